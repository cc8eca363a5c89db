"""Models taken apart: packed sequences get the logits and gradients they get alone."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForSequenceClassification

from frostlab.models.attention import attend
from frostlab.models.gpt import GPT
from frostlab.models.stack import take_apart
from frostlab.training.batches.batch import Batch, collate
from frostlab.training.batches.packing import Shapes, pack
from frostlab.training.step.objective import Objective, logits_of
from packed import MODELS, PAD, VOCABULARY, build, classifies, exactly, tokens

ROWS = np.array([4, 11, 7, 30, 31, 2, 19, 8, 55, 40])
EXACT = {"rtol": 1e-10, "atol": 1e-10}
FILLED = Shapes((256,), 14, 33)  # four places without an example, a row with much filler
OF_EACH_KIND = {"gpt classifier", "decoder qk_norm", "bert classifier", "gpt2", "llama"}


def packed_logits(model: nn.Module, batch: Batch) -> Tensor:
    return Objective(model)(batch, want="logits")


def logits_by_example(logits: Tensor, batch: Batch) -> list[Tensor]:
    """The logits of each example of a packed batch."""
    assert batch.packing is not None
    if logits.ndim == 2:
        return list(logits[: batch.examples])
    bounds = batch.packing.bounds.tolist()
    return [logits[0, bounds[i] : bounds[i + 1]] for i in range(batch.examples)]


@pytest.mark.parametrize("shapes", [None, FILLED], ids=["tight", "filled up"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_logits_equal_the_unpacked_ones(name: str, shapes: Shapes | None) -> None:
    model, data = exactly(name).eval(), tokens(labels=classifies(name))
    together = pack(data, ROWS, PAD, shapes=shapes)
    with torch.no_grad():
        found = logits_by_example(packed_logits(model, together), together)
        for row, logits in zip(ROWS, found, strict=True):
            alone = logits_of(model, collate(data, np.array([row]), PAD).inputs)[0]
            torch.testing.assert_close(logits, alone, **EXACT)


@pytest.mark.parametrize("name", MODELS)
def test_full_rows_in_pieces_equal_the_model(name: str) -> None:
    """Rows of one length have no mask; some tokens are the one that fills up elsewhere."""
    model = exactly(name).eval()
    data = tokens([9] * 12, labels=classifies(name), pairs=True)
    data.ids[[17, 52, 53]] = PAD
    inputs = collate(data, np.arange(12), PAD, types=name == "bert classifier")
    assert "attention_mask" not in inputs.inputs
    assert take_apart(model) is not None
    with torch.no_grad():
        found, wanted = packed_logits(model, inputs), logits_of(model, inputs.inputs)
    torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        *(pytest.param(name, None, id=f"{name}-tight") for name in MODELS),
        *(
            pytest.param(name, FILLED, id=f"{name}-filled up",
                         marks=() if name in OF_EACH_KIND else pytest.mark.slow)
            for name in MODELS
        ),
    ],
)  # fmt: skip
def test_packed_gradients_equal_the_unpacked_ones(name: str, shapes: Shapes | None) -> None:
    model, data = exactly(name).eval(), tokens(labels=classifies(name))

    def gradients(batch: Batch) -> dict[str, Tensor]:
        model.zero_grad()
        Objective(model)(batch).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    apart, together = gradients(collate(data, ROWS, PAD)), gradients(
        pack(data, ROWS, PAD, shapes=shapes)
    )  # fmt: skip
    assert apart.keys() == together.keys()
    for parameter, gradient in apart.items():
        torch.testing.assert_close(together[parameter], gradient, **EXACT, msg=parameter)


@pytest.mark.parametrize("name", MODELS)
def test_sequences_do_not_see_each_other(name: str) -> None:
    model, data = build(name).eval(), tokens(labels=classifies(name))
    batch = pack(data, ROWS, PAD)
    assert batch.packing is not None
    begin, end = batch.packing.bounds[3:5].tolist()
    ids = batch.inputs["input_ids"].clone()
    ids[0, begin:end] = (ids[0, begin:end] + 17) % VOCABULARY
    other = batch.with_tensors([ids, *batch.tensors()[1:]])
    with torch.no_grad():
        before, after = (logits_by_example(packed_logits(model, b), b) for b in (batch, other))
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(old, new) == (i != 3)


def test_types_of_pairs_are_packed() -> None:
    model, data = exactly("bert classifier").eval(), tokens(labels=True, pairs=True)
    apart, together = collate(data, ROWS, PAD, types=True), pack(data, ROWS, PAD, types=True)
    with torch.no_grad():
        found = packed_logits(model, together)
        torch.testing.assert_close(found, logits_of(model, apart.inputs), **EXACT)
        blind = packed_logits(model, pack(data, ROWS, PAD))
    assert not torch.allclose(found, blind, atol=1e-4), "the types say something"


def test_dropout_is_drawn_inside_packed_attention() -> None:
    batch = pack(tokens(labels=True), ROWS, PAD)
    query, key, value = torch.randn(3, 1, 4, batch.tokens, 8)
    made = []
    for seed, dropout in ((1, 0.5), (1, 0.5), (2, 0.5), (1, 0.0)):
        torch.manual_seed(seed)
        made.append(attend(query, key, value, packing=batch.packing, dropout=dropout))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert not torch.equal(made[0], made[3])


@pytest.mark.parametrize("name", ["gpt classifier", "bert classifier"])
def test_a_packed_model_drops_out_while_it_trains(name: str) -> None:
    """Only attention's dropout is on."""
    model: Any = build(name).train()
    if name == "gpt classifier":
        model.config = dataclasses.replace(model.config, dropout=0.0)
        for block in model.blocks:
            block.drop = lambda x: x
    else:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for layer in model.bert.encoder.layer:
            layer.attention.self.dropout.p = 0.3
    batch, losses = pack(tokens(labels=True), ROWS, PAD), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(float(Objective(model)(batch).detach()))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("name", [n for n in MODELS if not classifies(n)])
def test_rows_without_a_packing_are_read_as_the_model_reads_them(name: str) -> None:
    model, data = exactly(name).eval(), tokens(labels=False)
    batch = collate(data, ROWS, PAD)
    stack = take_apart(model)
    assert stack is not None
    with torch.no_grad():
        ids = batch.inputs["input_ids"]
        mine = stack.head(stack.read(stack.run(stack.embed(ids, None, None), None), ids, None))
        theirs = logits_of(model, batch.inputs)
    torch.testing.assert_close(mine, theirs, **EXACT)


def test_a_model_keeps_its_own_attention() -> None:
    model: Any = build("bert classifier")
    before = model.config._attn_implementation
    packed_logits(model, pack(tokens(labels=True), ROWS, PAD))
    assert model.config._attn_implementation == before != "frostlab"


@pytest.mark.parametrize("name", ["gpt2 classifier", "llama classifier"])
def test_a_padding_token_at_the_end_is_ignored(name: str) -> None:
    """As the model itself does, which takes it for padding."""
    model, data = exactly(name).eval(), tokens([5, 9, 4, 7], labels=True)
    ids = data.ids.copy()
    ids[data.stops - 1] = PAD
    ids[data.starts[2] : data.stops[2]] = PAD  # nothing but padding: the first counts
    data = dataclasses.replace(data, ids=ids)
    with torch.no_grad():
        together = packed_logits(model, pack(data, np.arange(4), PAD))
        for row in range(4):
            alone = logits_of(model, collate(data, np.array([row]), PAD).inputs)[0]
            torch.testing.assert_close(together[row], alone, **EXACT)


@pytest.mark.parametrize(
    "kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_every_kind_of_hook_is_noticed(kind: str) -> None:
    model: Any = build("gpt2")
    getattr(model.transformer, f"register_{kind}")(lambda *given: None)
    assert take_apart(model) is None


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("gpt2", ""),
        ("gpt2", "lm_head"),
        ("gpt2", "transformer"),
        ("bert classifier", "bert.encoder"),
        ("bert decoder", "cls"),
        ("bert decoder", "cls.predictions"),
    ],
)
def test_hooks_are_called(name: str, place: str) -> None:
    """A model that somebody has hooked into is called as it is."""
    model: Any = build(name)
    assert take_apart(model) is not None
    seen: list[int] = []
    model.get_submodule(place).register_forward_hook(lambda *given: seen.append(1))
    assert take_apart(model) is None
    Objective(model)(collate(tokens(labels="classifier" in name), ROWS, PAD))
    assert seen


def test_a_users_class_is_called_as_it_is() -> None:
    class Louder(GPT):
        def forward(self, *given: Any, **named: Any) -> Tensor:
            return 2 * super().forward(*given, **named)

    plain = build("gpt").eval()
    louder = Louder(plain.config).eval()  # type: ignore[arg-type]
    louder.load_state_dict(plain.state_dict())
    batch = collate(tokens(labels=False), ROWS, PAD)
    with torch.no_grad():
        assert not torch.allclose(Objective(louder)(batch), Objective(plain)(batch), rtol=1e-4)


def test_other_architectures_have_no_stack() -> None:
    config = RobertaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    assert take_apart(RobertaForSequenceClassification(config)) is None
    assert take_apart(nn.Linear(2, 2)) is None


# Two ways to pack that look right and are not. If one of these fails, transformers has changed.


def _packed_by_hand(model: nn.Module, mask: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Logits of two sequences of one row, by a mask of our own making, and of each alone."""
    data = tokens([6, 9], labels=False)
    ids = torch.from_numpy(data.ids.astype(np.int64))[None]
    places = torch.cat([torch.arange(6), torch.arange(9)])[None]
    given: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
    with torch.no_grad():
        together = logits_of(model, {"input_ids": ids, "position_ids": places, **given})
        alone = [logits_of(model, {"input_ids": part}) for part in (ids[:, :6], ids[:, 6:])]
    return together, alone


def test_a_boolean_mask_misleads_eager_attention() -> None:
    """It is added to the scores as 0 and 1; the same mask in floats is right."""
    model: Any = exactly("bert decoder").eval()
    model.set_attn_implementation("eager")
    owners = torch.tensor([0] * 6 + [1] * 9)
    places = torch.arange(15)
    seen = ((owners[:, None] == owners) & (places[:, None] >= places))[None, None]
    wrong, alone = _packed_by_hand(model, seen)
    assert not torch.allclose(wrong[:, :6], alone[0], atol=1e-3)
    right, _ = _packed_by_hand(model, torch.where(seen, 0.0, -1e30).double())
    torch.testing.assert_close(right[:, 6:], alone[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_positions_alone_do_not_separate(name: str, attention: str) -> None:
    model: Any = exactly(name).eval()
    model.set_attn_implementation(attention)
    together, alone = _packed_by_hand(model, None)
    # its eager attention takes the softmax in float32
    torch.testing.assert_close(together[:, :6], alone[0], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(together[:, 6:], alone[1], atol=1e-3), "it saw the first sequence"
