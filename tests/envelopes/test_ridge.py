"""The ridge decoder against a naive solve, against mTRF, and on recordings with a known answer."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from eeg_made import RATE, Made, made, people
from frostlab.envelopes.correlation import fisher_z, pearson
from frostlab.envelopes.ridge import Lags, Moments, fit_ridge, recording_moments, ridge_path
from frostlab.errors import BadInput

Floats = NDArray[np.float64]


def lagged(eeg: NDArray[np.float32], lags: Lags) -> Floats:
    """The matrix nobody builds: EEG of t + lag, 0 beyond the ends."""
    found = np.zeros((len(eeg), len(lags), eeg.shape[1]))
    for i, lag in enumerate(range(lags.first, lags.last + 1)):
        for t in range(len(eeg)):
            if 0 <= t + lag < len(eeg):
                found[t, i] = eeg[t + lag]
    return found.reshape(len(eeg), -1)


def solved(recordings: list[Made], lags: Lags, strength: float) -> tuple[Floats, float]:
    """Ridge with a bias that is not penalised, by the normal equations."""
    x = np.concatenate([lagged(each.eeg, lags) for each in recordings])
    y = np.concatenate([each.envelope for each in recordings]).astype(float)
    size = x.var(0).mean()
    x = np.column_stack([x, np.ones(len(x))])
    penalty = np.diag([*np.full(x.shape[1] - 1, strength * size * len(x)), 0.0])
    weights = np.linalg.solve(x.T @ x + penalty, x.T @ y)
    return weights[:-1], weights[-1]


@pytest.mark.parametrize("ends", [(0, 4), (2, 3), (-3, 2), (-4, -1), (0, 0)])
def test_sums_are_those_of_the_lagged_matrix(ends: tuple[int, int]) -> None:
    lags, recording = Lags(*ends), made("a", "s", seed=0, samples=50, channels=3)
    x, y = lagged(recording.eeg, lags), recording.envelope.astype(float)
    found = recording_moments(recording, lags)
    np.testing.assert_allclose(found.xx, x.T @ x, atol=1e-9)
    np.testing.assert_allclose(found.xy, x.T @ y, atol=1e-9)
    np.testing.assert_allclose(found.x, x.sum(0), atol=1e-9)
    assert found.samples == 50
    weights = np.random.default_rng(0).standard_normal((len(lags), 3, 2))
    np.testing.assert_allclose(
        lags.apply(recording.eeg, weights).T, x @ weights.reshape(-1, 2), atol=1e-9
    )


@pytest.mark.parametrize("channels", [1, 4])
def test_weights_are_those_of_a_naive_solve(channels: int) -> None:
    recordings = [
        replace(each, eeg=each.eeg + np.float32(0.7), envelope=each.envelope + np.float32(2))
        for each in people(1, 3, samples=200, channels=channels)
    ]
    for strength in (1e-3, 10.0):
        ridge = fit_ridge(recordings, RATE, (0.0, 0.1), [strength])
        weights, bias = solved(recordings, ridge.lags, strength)
        assert ridge.lags == Lags(0, 3)
        np.testing.assert_allclose(ridge.everybody.weights.ravel(), weights, atol=1e-9)
        expected = lagged(recordings[0].eeg, ridge.lags) @ weights + bias
        np.testing.assert_allclose(ridge.predict(recordings[0]), expected, atol=1e-8)


def test_one_feature_needs_no_reduction() -> None:
    recordings = people(1, 2, samples=100, channels=1)
    ridge = fit_ridge(recordings, RATE, (0.0, 0.0), [1.0])
    weights, bias = solved(recordings, Lags(0, 0), 1.0)
    np.testing.assert_allclose(ridge.everybody.weights.ravel(), weights, atol=1e-12)
    assert ridge.everybody.bias == pytest.approx(bias)


def test_the_decoder_is_mtrfs() -> None:
    mtrf = pytest.importorskip("mtrf")
    recordings = people(1, 3, samples=200, channels=4)
    strength = 0.5
    ridge = fit_ridge(recordings, RATE, (0.0, 0.125), [strength])
    total = Moments.zero(5 * 4)
    for each in recordings:
        total.add(recording_moments(each, ridge.lags))
    size = np.trace(total.covariance()[0]) / 20
    model = mtrf.TRF(direction=-1)
    model.train(
        [each.envelope[:, None].astype(float) for each in recordings],
        [each.eeg.astype(float) for each in recordings],
        int(RATE),
        0.0,
        0.125,
        strength * size * 200 / RATE,  # theirs is added, times the rate, to a recording's sums
        verbose=False,
    )
    for each in recordings:
        (said,) = model.predict(None, [each.eeg.astype(float)])
        np.testing.assert_allclose(ridge.predict(each), said[:, 0], atol=1e-8)


def test_lambda_is_what_leaving_out_says() -> None:
    recordings, lambdas = people(1, 3, samples=200, noise=6.0), (1e-3, 0.1, 1.0, 10.0)
    ridge = fit_ridge(recordings, RATE, (0.0, 0.1), lambdas)
    curve = {}
    for strength in lambdas:
        found = []
        for out in range(3):
            weights, _ = solved(recordings[:out] + recordings[out + 1 :], ridge.lags, strength)
            predicted = lagged(recordings[out].eeg, ridge.lags) @ weights
            found.append(fisher_z(pearson(predicted, recordings[out].envelope)))
        curve[strength] = float(np.tanh(np.mean(found)))
    assert ridge.everybody.curve == pytest.approx(curve)
    assert ridge.everybody.strength == max(curve, key=curve.__getitem__)
    weights, _ = solved(recordings, ridge.lags, ridge.everybody.strength)
    np.testing.assert_allclose(ridge.everybody.weights.ravel(), weights, atol=1e-9)


def test_folds_leave_out_groups_of_recordings() -> None:
    recordings, lambdas = people(1, 5, samples=150), (0.01, 1.0)
    ridge = fit_ridge(recordings, RATE, (0.0, 0.1), lambdas, folds=2)
    found = []
    for out in ((0, 2, 4), (1, 3)):
        rest = [each for i, each in enumerate(recordings) if i not in out]
        weights, _ = solved(rest, ridge.lags, 0.01)
        for i in out:
            predicted = lagged(recordings[i].eeg, ridge.lags) @ weights
            found.append(fisher_z(pearson(predicted, recordings[i].envelope)))
    assert ridge.everybody.curve[0.01] == pytest.approx(np.tanh(np.mean(found)))


def test_everyone_gets_an_own_decoder_and_strangers_the_shared_one() -> None:
    opposite = (-1.0, 0.5, -0.8, -0.3)
    first = [made(f"a{i}", "a", seed=i) for i in range(3)]
    second = [made(f"b{i}", "b", seed=10 + i, response=opposite) for i in range(3)]
    train = [*first, *second]
    fresh = made("fresh", "b", seed=50, response=opposite)
    own, shared = fit_ridge(train, RATE), fit_ridge(train, RATE, per="all")
    assert pearson(own.predict(fresh), fresh.envelope) > 0.4
    assert pearson(own.predict(replace(fresh, subject="a")), fresh.envelope) < -0.4
    assert abs(pearson(shared.predict(fresh), fresh.envelope)) < 0.3
    stranger = replace(fresh, subject="c")
    np.testing.assert_array_equal(own.predict(stranger), shared.predict(stranger))
    alone = fit_ridge(second, RATE)
    assert own.own["b"].curve == pytest.approx(alone.everybody.curve)
    np.testing.assert_allclose(own.predict(fresh), alone.predict(fresh), atol=1e-9)
    assert shared.own == {}


def test_a_subject_with_one_recording_gets_everybodys_lambda() -> None:
    train = [made(f"{s}", s, seed=i) for i, s in enumerate("abc")]
    ridge = fit_ridge(train, RATE, folds=2)
    assert len(ridge.everybody.curve) > 1
    assert {each.strength for each in ridge.own.values()} == {ridge.everybody.strength}
    weights, _ = solved(train[:1], ridge.lags, ridge.everybody.strength)
    np.testing.assert_allclose(ridge.own["a"].weights.ravel(), weights, atol=1e-9)


def test_the_pattern_is_what_the_eeg_does_with_the_prediction() -> None:
    recordings = people(1, 3, noise=1.0)
    ridge = fit_ridge(recordings, RATE)
    x = np.concatenate([lagged(each.eeg, ridge.lags) for each in recordings])
    said = np.concatenate([ridge.predict(each) for each in recordings])
    pattern = ridge.everybody.pattern
    expected = ((x - x.mean(0)) * (said - said.mean())[:, None]).mean(0)
    np.testing.assert_allclose(pattern.ravel(), expected, atol=1e-9)
    assert np.abs(pattern).max(1).argmax() == 1  # samples after the envelope
    assert np.corrcoef(pattern[1], (1.0, -0.5, 0.8, 0.3))[0, 1] > 0.95


def test_a_path_has_an_answer_for_every_lambda() -> None:
    recording = made("a", "s", seed=0, samples=100)
    moments = recording_moments(recording, Lags(0, 3))
    both = ridge_path(moments, [0.1, 5.0])
    for k, strength in enumerate((0.1, 5.0)):
        np.testing.assert_allclose(both[:, k], solved([recording], Lags(0, 3), strength)[0])


A = made("a", "s", seed=0, samples=100)


@pytest.mark.parametrize(
    ("train", "settings", "said"),
    [
        ([A], {}, "one recording to train on (a) cannot choose the ridge decoder's λ; give two"),
        ([], {}, "there is no recording here; at least one is needed"),
        ([A, A], {}, "two recordings are called a; names must differ"),
        ([A], {"per": "subjects"}, "per must be subject or all, not 'subjects'; did you mean"),
        ([A], {"lambdas": [0.0]}, "λ must be numbers above 0, not [0.0]; e.g. [0.01, 1, 100]"),
        ([A], {"folds": 1}, "1 folds leave nothing to train on; the least is 2"),
        ([A], {"lags": (0.25, 0.0)}, "lags from 0.25 s to 0 s run backwards; e.g. 0 to 0.25"),
        ([A], {"lags": (0, 5), "lambdas": [1]}, "a has 100 samples; it needs more than 160"),
        ([A, made("b", "s", seed=1, channels=3)], {}, "b has 3 channels, and a has 4"),
        ([replace(A, envelope=A.envelope[1:])], {"lambdas": [1]}, "a: EEG (100, 4) and envelope"),
        ([replace(A, eeg=A.eeg * np.float32(0))], {"lambdas": [1]}, "the EEG is constant"),
        ([replace(A, eeg=A.eeg * np.float32("nan"))], {"lambdas": [1]}, "a has values that"),
    ],
)  # fmt: skip
def test_what_cannot_be_fitted_is_refused(
    train: list[Made], settings: dict[str, object], said: str
) -> None:
    with pytest.raises(BadInput) as caught:
        fit_ridge(train, RATE, **settings)  # type: ignore[arg-type]
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_other_channels_than_trained_on_are_refused() -> None:
    ridge = fit_ridge([A], RATE, lambdas=[1.0])
    with pytest.raises(BadInput, match="^b has 3 channels, and the decoder was trained on 4$"):
        ridge.predict(made("b", "s", seed=1, channels=3))
