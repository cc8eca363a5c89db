"""Inputs of a small forward pass are guessed: Hugging Face, torch.nn and hand-written models."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import frostlab as fl
from cases import slow_unless
from frostlab.roles.tracing.passes.facts import Call
from frostlab.roles.tracing.passes.inputs import MOST_CALLS, candidate_inputs, no_inputs
from small_types import small_model

FAST = (
    "bert", "gpt2", "llama", "deepseek_v3", "t5", "vit", "clip", "llava", "qwen2_5_vl", "whisper",
    "wav2vec2", "jamba",
)  # fmt: skip
SAMPLE = (
    *FAST, "albert", "aya_vision", "bart", "beit", "big_bird", "blip", "bloom", "camembert",
    "codegen", "cohere2", "convbert", "data2vec-audio", "deberta-v2", "deit", "dinov2",
    "distilbert", "electra", "ernie", "falcon", "gemma2", "gemma3", "gpt_neox", "gpt_oss",
    "granite", "granitemoe", "hubert", "idefics3", "internvl", "layoutlm", "mamba", "marian",
    "mbart", "mistral3", "mixtral", "modernbert", "mpnet", "mt5", "olmo2", "opt", "paligemma",
    "persimmon", "phi3", "qwen3_moe", "qwen3_next", "roformer", "siglip2", "smolvlm",
    "speech_to_text", "swinv2", "time_series_transformer", "vilt", "videomae", "xlnet",
)  # fmt: skip


def first_that_runs(model: nn.Module) -> Call:
    reasons = []
    for call in candidate_inputs(model):
        try:
            with torch.no_grad():
                model(*call.args, **call.kwargs)
        except Exception as error:
            reasons.append(error)
        else:
            return call
    raise AssertionError(reasons)


@pytest.mark.parametrize("kind", slow_unless(FAST, SAMPLE))
@pytest.mark.filterwarnings("ignore")
def test_a_model_runs_on_a_guess_and_nothing_moves(kind: str) -> None:
    model = small_model(kind)
    before = {name: item.clone() for name, item in model.state_dict().items()}
    state = torch.get_rng_state()
    assert list(candidate_inputs(model))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(item, before[name]) for name, item in model.state_dict().items())
    call = first_that_runs(model)
    assert "output_attentions" not in call.kwargs
    assert call.kwargs.get("use_cache", False) is False


@pytest.mark.filterwarnings("ignore")
def test_text_alone_is_tried_although_many_layouts_of_images_and_sound_come_first() -> None:
    model = small_model("gemma4")  # its config names images and sound, but the model has neither
    tried = list(islice(candidate_inputs(model), MOST_CALLS))
    assert any(set(call.kwargs) <= {"input_ids", "use_cache"} for call in tried)
    assert fl.anatomy(model).select("query")


def test_text_has_two_samples_of_six_words_without_special_ones() -> None:
    (ids,) = [
        value
        for value in first_that_runs(small_model("bert")).kwargs.values()
        if torch.is_tensor(value)
    ]
    assert ids.shape == (2, 6)
    assert ids.min() >= 3
    assert ids.unique().numel() == ids.numel()


def test_a_decoder_gets_a_length_of_its_own() -> None:
    kwargs = first_that_runs(small_model("t5")).kwargs
    assert kwargs["input_ids"].shape == (2, 6)
    assert kwargs["decoder_input_ids"].shape == (2, 5)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_an_image_has_as_many_tokens_as_the_model_makes_of_it(kind: str) -> None:
    model = small_model(kind)
    call = first_that_runs(model)
    assert "pixel_values" in call.kwargs
    assert (call.kwargs["input_ids"] == model.config.image_token_id).sum(1).min() > 0


def test_the_same_guesses_are_made_every_time() -> None:
    model = small_model("gpt2")
    first, second = first_that_runs(model), first_that_runs(model)
    assert torch.equal(first.kwargs["input_ids"], second.kwargs["input_ids"])


class Words(nn.Module):
    """A hand-written GPT in miniature: `forward(idx, targets=None)`."""

    def __init__(self, exact: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.position = nn.Embedding(12, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.exact = exact

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        assert targets is None
        length = 12 if self.exact else idx.shape[1]
        return self.layer(self.embed(idx) + self.position.weight[:length])


class Picture(nn.Module):
    """A hand-written vision transformer whose image size is told by its positions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 8, 7, 7)
        self.pos_embed = nn.Parameter(torch.randn(1, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.patch(x).flatten(2).transpose(1, 2) + self.pos_embed


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


class Around(nn.Module):
    """Passes whatever it gets to the model that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.inner = nn.CrossEntropyLoss(), Words()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.both = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.both(self.embed(src), self.embed(tgt))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Words, (2, 6)),
        (lambda: Words(exact=True), (2, 12)),
        (Around, (2, 6)),
        (Picture, (2, 1, 28, 28)),
        (Vectors, (2, 6, 5)),
        (Two, (2, 6)),
        (lambda: nn.MultiheadAttention(8, 2), (6, 2, 8)),
        (lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, batch_first=True), (2, 6, 8)),
        (lambda: nn.Transformer(8, 2, 1, 1, 16), (6, 2, 8)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 6, 8)),
        (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2), (6, 2, 8)),
    ],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_models_of_torch_and_by_hand_are_called_by_position(
    model: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    call = first_that_runs(model().eval())
    assert call.args[0].shape == shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_inputs_have_the_type_of_the_weights(dtype: torch.dtype) -> None:
    assert first_that_runs(Vectors().to(dtype)).args[0].dtype == dtype


class Strange(nn.Module):
    def forward(self, x: Tensor, session: Any, plan: Any, mode: Any) -> None:
        raise NotImplementedError


def test_what_nobody_can_guess_is_named_in_one_line() -> None:
    assert list(candidate_inputs(Strange())) == []
    message = no_inputs(Strange(), "", began=False)
    assert "cannot guess `x` of Strange.forward" in message
    assert "fl.anatomy(model, {'x': tensor})" in message
    assert "\n" not in message


class ByName(Vectors):
    def forward(self, *, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def test_an_argument_that_can_only_be_given_by_name() -> None:
    assert first_that_runs(ByName().eval()).kwargs["x"].shape == (2, 6, 5)


class Anything(nn.Module):
    def forward(self, *args: Any) -> None:
        raise NotImplementedError


class Named(nn.Module):
    def forward(self, **kwargs: Any) -> None:
        raise NotImplementedError


def test_the_batch_of_a_hint_fits_the_forward_pass() -> None:
    assert "fl.anatomy(model, (tensor,))" in no_inputs(Anything(), "", began=False)
    assert "fl.anatomy(model, {'inputs': tensor})" in no_inputs(Named(), "", began=False)
    assert "fl.anatomy(model, {'x': tensor})" in no_inputs(ByName(), "", began=False)
