"""Deep supervision: the loss is the plain sum over layers, and what cannot be is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import frostlab as fl
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.settings import Optim, Supervise, Train
from frostlab.training.batches.batch import IGNORED, Batch, collate
from frostlab.training.batches.packing import pack
from frostlab.training.batches.prefix import build_prefix
from frostlab.training.distributed import Compute
from frostlab.training.step.captured import CapturedStep
from frostlab.training.step.compiled import CompiledStep
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.objective import Objective, Supervision, resolve_supervision
from frostlab.training.step.optimizer import Bf16Copies, build_optimizer
from heads import assert_same
from packed import PAD, VOCABULARY, build, prepared, tokens

CPU = torch.device("cpu")

ROWS = np.array([4, 11, 7, 30, 31, 2])
_GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4,
                         "n_positions": 40, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 40,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def decoder(norm: Any, final: bool) -> Decoder:
    return Decoder(DecoderConfig(VOCABULARY, 32, 3, 4, 48, norm=norm, final_norm=final))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(GPTConfig(VOCABULARY, 40, 32, 3, 4, 48)),
    "decoder after": lambda: decoder("after", False),
    "decoder after, final": lambda: decoder("after", True),
    "decoder before": lambda: decoder("before", False),
    "decoder before, final": lambda: decoder("before", True),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_LLAMA)),
}
WEIGHTS = {1: 0.3, 2: 1.7, 3: 0.5}
FROZEN = {"gpt": ("embedding", "position", "layers[0]"), "llama": ("embedding", "layers[0]"),
          "decoder after": ("embedding", "layers[0]")}  # fmt: skip


def made(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    for p in model.parameters():  # norms and biases that do something
        if p.ndim == 1:
            p.data.add_(0.2 * torch.randn_like(p))
    return model


def supervise(layers: Any = "all", **more: Any) -> Supervise:
    if isinstance(layers, list):
        layers = tuple(layers)
    return Supervise(layers=layers, **more)


def naive(model: Any, batch: Batch, weights: dict[int, float]) -> Tensor:
    """The model's own forward with a hook a layer; its norm, its head, all logits."""
    body = getattr(model, "transformer", getattr(model, "model", model))
    layers = next(getattr(body, n) for n in ("blocks", "h", "layers") if hasattr(body, n))
    norm = next(getattr(body, n) for n in ("norm", "ln_f") if hasattr(body, n))
    head = getattr(model, "lm_head", None) or model.head
    found: list[Tensor] = []
    hooks = [each.register_forward_hook(lambda _, given, out: found.append(out)) for each in layers]
    model(batch.inputs["input_ids"])
    for hook in hooks:
        hook.remove()
    losses = [
        weight * F.cross_entropy(head(norm(found[number - 1])).flatten(0, 1),
                                 batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")
        for number, weight in weights.items()
    ]  # fmt: skip
    return torch.stack(losses).sum()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(model: nn.Module, ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)
    wanted, found = gradients(model, theirs), gradients(model, ours)
    assert found.keys() == wanted.keys()
    assert_same(list(found.values()), list(wanted.values()))


def objective_of(model: nn.Module, wanted: Supervise) -> Objective:
    objective = Objective(model)
    objective.supervision = resolve_supervision(wanted, model)
    return objective


@pytest.mark.parametrize("chosen", [(1, 2, 3), (1, 3), (3,)])
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_the_naive_sum(name: str, chosen: tuple[int, ...]) -> None:
    """Rows are filled up, and the first tokens of some examples are not scored."""
    model, data = made(name), tokens(labels=False)
    data = replace(data, scored_from=(data.lengths // 3).astype(np.int32))
    batch = collate(data, ROWS, PAD)
    assert (batch.targets == IGNORED).any()
    weights = {number: WEIGHTS[number] for number in chosen}
    wanted = supervise(chosen, weights=tuple(weights.values()))
    assert_equal(model, objective_of(model, wanted)(batch), naive(model, batch, weights))


@pytest.mark.parametrize("name", MODELS)
def test_packed_examples_get_the_same_loss(name: str) -> None:
    model, data = made(name), tokens(labels=False)
    ours = objective_of(model, supervise())(pack(data, ROWS, PAD))
    third = dict.fromkeys((1, 2, 3), 1 / 3)
    assert_equal(model, ours, naive(model, collate(data, ROWS, PAD), third))


@pytest.mark.parametrize("name", FROZEN)
def test_losses_that_could_only_move_the_head_are_left_out_unless_asked_for(name: str) -> None:
    model, batch = made(name), collate(tokens(labels=False), ROWS, PAD)
    if name != "gpt":
        fl.freeze(model, *FROZEN[name])
        assert resolve_supervision(supervise(), model) == Supervision((2, 3), (0.5, 0.5), (1,))
        ours = objective_of(model, supervise(weights=(0.3, 1.7, 0.5)))(batch)
        assert_equal(model, ours, naive(model, batch, {2: 1.7, 3: 0.5}))
    else:  # its head is the embedding: freezing the first layer alone leaves that learning
        fl.freeze(model, "layers[0]")
        assert resolve_supervision(supervise(), model) == Supervision((1, 2, 3), (1 / 3,) * 3)
    every = supervise(weights=(0.3, 1.7, 0.5), frozen=True)
    found = resolve_supervision(every, model)
    assert found == Supervision((1, 2, 3), (0.3, 1.7, 0.5))
    assert_equal(model, objective_of(model, every)(batch), naive(model, batch, WEIGHTS))


def test_the_last_layers_loss_always_stays() -> None:
    model = made("decoder after")
    fl.freeze(model, "all", "!head")
    assert resolve_supervision(supervise(), model) == Supervision((3,), (1.0,), (1, 2))


def test_layers_may_be_named_in_any_order() -> None:
    found = resolve_supervision(supervise([3, 1], weights=(0.9, 0.1)), made("gpt"))
    assert found == Supervision((1, 3), (0.1, 0.9))


def test_the_default_is_the_models_own_loss_for_any_model() -> None:
    assert resolve_supervision(Supervise(), made("gpt")) is None
    assert resolve_supervision(Supervise(), nn.Linear(2, 2)) is None


@pytest.mark.parametrize("name", FROZEN)
def test_cached_first_layers_change_no_loss_and_no_gradient(name: str) -> None:
    model, data = made(name), prepared(labels=False)
    fl.freeze(model, *FROZEN[name])
    objective = objective_of(model, supervise())
    assert objective.supervised == (2, 3)
    kept = build_prefix(model, data, Train(cache_prefix="memory"), torch.float64, types=False)
    plain = objective(pack(data.splits["train"], ROWS, PAD))
    objective.prefix = kept
    cached = objective(pack(data.splits["train"], ROWS, PAD, cached_starts=kept.starts))
    assert_equal(model, cached, plain)


@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "decoder before"])
def test_copies_in_bf16_give_the_gradients_of_autocast_to_the_bit(name: str) -> None:
    model, batch, found = made(name).float(), collate(tokens(labels=False), ROWS, PAD), []
    every_copy = Bf16Copies(model)
    assert every_copy
    optimizer = torch.optim.AdamW(model.parameters())
    for copies in (None, every_copy):
        objective = objective_of(model, supervise())
        step = EagerStep(objective, optimizer, Compute(CPU, torch.bfloat16), None, copies=copies)
        optimizer.zero_grad()
        step.gradients([batch], batch.scored)
        each = [g.float() for p in model.parameters() if (g := step._gradient(p)) is not None]
        found.append(each)
        every_copy.clear()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def losses_of(kind: type[EagerStep], **more: Any) -> list[float]:
    """Four steps with every layer supervised, then four with the last alone."""
    model = made("decoder after").train()
    objective = objective_of(model, supervise())
    optimizer = build_optimizer(model, Optim(), fused=True)
    step = kind(objective, optimizer, Compute(CPU, torch.float32), 1.0, **more)
    batch, seen = collate(tokens(labels=False), ROWS, PAD), []
    for i in range(8):
        if i == 4:
            objective.supervision = None
        seen.append(float(step([batch], batch.scored, 1e-2).loss))
        assert step.kind == kind.kind, step.reason
    return seen


def test_a_captured_step_notices_that_other_layers_are_supervised() -> None:
    """The stand-in for a graph fails where a graph would go on with the old losses."""
    recorded: list[int] = []

    def record(work: Callable[[], None]) -> Callable[[], None]:
        recorded.append(1)
        left = [2]  # replays before the layers change: the second of four steps records

        def replay() -> None:
            assert left[0] >= 0, "a graph of the other layers"
            left[0] -= 1
            work()

        return replay

    captured = losses_of(CapturedStep, compiles=False, record=record)
    assert captured == pytest.approx(losses_of(EagerStep), rel=1e-5)
    assert len(recorded) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_layers_give_the_same_losses() -> None:
    assert losses_of(CompiledStep) == pytest.approx(losses_of(EagerStep), rel=1e-5)


@pytest.mark.parametrize(("wanted", "line"), [
    (supervise([1, 4]), "supervise.layers: there is no layer 4; the model has 1 to 3"),
    (supervise(weights=(1.0, 2.0)), "supervise.weights has 2 values for 3 layers"),
    (supervise("last", weights=(1.0, 2.0)), "supervise.weights has 2 values for 1 layers"),
    (supervise([1, 2]), "supervise.layers end at 2, but layers above it learn and would get no "
                        "gradient; add layer 3, or freeze them"),
])  # fmt: skip
def test_what_a_model_does_not_have_is_refused(wanted: Supervise, line: str) -> None:
    with pytest.raises(fl.BadInput) as refused:
        resolve_supervision(wanted, made("decoder after"))
    assert str(refused.value) == line


def test_only_frozen_layers_are_refused() -> None:
    model = made("decoder after")
    fl.freeze(model, "embedding", "layers[0:2]")
    with pytest.raises(fl.BadInput, match=r"\[1, 2\] have no trainable weight.*; add layer 3, or"):
        resolve_supervision(supervise([1, 2]), model)


def test_other_models_are_refused() -> None:
    sizes = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
    others = [build("gpt classifier"), build("bert classifier"), GPTNeoXForCausalLM(
        GPTNeoXConfig(**sizes))]  # fmt: skip
    for model in others:
        with pytest.raises(
            fl.BadInput, match=f"supervise.layers does not support {type(model).__name__}"
        ):
            resolve_supervision(supervise(), model)


def test_a_hooked_model_is_refused_before_its_last_layer_is_taken_for_all() -> None:
    model = made("gpt2")
    objective = objective_of(model, supervise())
    model.register_forward_hook(lambda *given: None)
    with pytest.raises(fl.BadInput, match="without hooks"):
        objective(collate(tokens(labels=False), ROWS, PAD))
