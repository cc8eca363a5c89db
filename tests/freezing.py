"""Freeze and train small models that no table describes, and say what moved."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import frostlab as fl
from frostlab.roles.read import survey
from frostlab.roles.tracing.passes.facts import Call
from frostlab.roles.tracing.passes.inputs import candidate_inputs

STEPS = 20
# The first 50 of all types, shuffled by `random.Random(26)`, that the probe reads and whose small
# models have at most 21 million parameters.
DRAWN = (
    "deepseek_vl_hybrid", "minimax_m2", "moshi", "sam3_vit_model", "pocket_tts_audio_tokenizer",
    "muse_glimmer_vision", "vivit", "cohere2_moe", "lxmert", "glm4v_moe", "data2vec-vision",
    "glmga", "qwen3_5_moe_text", "deepseek_v32", "efficientloftr", "cvt", "sam3_vision_model",
    "granitemoe_swa", "markuplm", "vit_mae", "qwen3_vl_vision", "qianfan_ocr_vision", "nemotron",
    "ernie4_5", "sam", "hunyuan_v1_dense", "gemma", "siglip", "time_series_transformer", "ijepa",
    "timesformer", "roc_bert", "dpr", "glm4", "tipsv2", "pocket_tts_audio_tokenizer_decoder",
    "aimv2", "vilt", "sam_hq", "kolibri1", "vision-text-dual-encoder", "kimi_k25",
    "mistral_large4", "youtu", "mellum", "glm_ocr_vision", "gradium_phonon_tts", "gemma3",
    "mimo_v2_flash", "dia",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What some steps of training did to a model with frozen parts."""

    frozen: int  # numbers that were frozen; none of them moved
    trainable: int
    moved: int  # trainable parameters that moved
    still: list[str]  # names of those that did not: the loss has no gradient for them


def floats(value: Any) -> list[Tensor]:
    """Return the floating-point tensors of a model's output that have a history."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() and value.grad_fn is not None else []
    items = list(value.values()) if hasattr(value, "values") else value
    if not isinstance(items, list | tuple):
        return []
    return [tensor for item in items for tensor in floats(item)]


def loss_of(model: nn.Module, call: Call) -> Tensor:
    outputs = floats(model(*call.args, **call.kwargs))
    return torch.stack([o.float().nan_to_num(0, 0, 0).square().mean() for o in outputs]).sum()


def working_call(model: nn.Module) -> Call:
    """Return the first guess of inputs with which a model runs."""
    for call in candidate_inputs(model):
        try:
            loss_of(model, call)
        except Exception:
            continue
        return call
    raise AssertionError("no inputs")


def values_of(model: nn.Module) -> dict[str, Tensor]:
    anatomy, slots = survey(model)
    return {part.key: slots[part.name].read(part.rows).clone() for part in anatomy.parts}


def trained(model: nn.Module, call: Call) -> set[int]:
    """Train for some steps; return the ids of parameters that received a gradient."""
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-3, weight_decay=0.1)
    reached: set[int] = set()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, call)
        assert loss.isfinite()
        loss.backward()
        reached |= {id(p) for p in learning if p.grad is not None and bool(p.grad.any())}
        optimizer.step()
    return reached


def check_training(model: nn.Module, call: Call, *selections: str) -> Outcome:
    """Freeze and train: counts are exact, frozen bits stay, all that has a gradient moves."""
    total = sum(p.numel() for p in model.parameters())
    anatomy = fl.freeze(model, *selections)
    chosen = {part.key for part in anatomy.select(*selections)}
    frozen = sum(math.prod(part.shape) for part in anatomy.parts if part.key in chosen)
    learning = {id(p): p for p in model.parameters() if p.requires_grad}
    assert frozen > 0
    assert sum(p.numel() for p in model.parameters() if not p.requires_grad) == frozen
    assert sum(p.numel() for p in learning.values()) == anatomy.count("trainable")
    assert anatomy.count("trainable") == total - frozen
    audit, before = fl.audit(model), values_of(model)
    starts = {key: p.detach().clone() for key, p in learning.items()}
    reached = trained(model, call)
    assert reached
    for slot in survey(model)[1].values():  # the trainable rows of a split weight learn
        if len(slot.pieces) > 1 and slot.name not in anatomy.evidence.unreached:
            assert reached & {id(piece.parameter) for piece in slot.pieces}, slot.name
    audit.verify(model)
    for key, value in values_of(model).items():
        assert key not in chosen or torch.equal(value, before[key]), key
    names = {id(p): name for name, p in model.named_parameters()}
    still = {key for key, p in learning.items() if torch.equal(p.detach(), starts[key])}
    assert not {names[key] for key in still & reached}
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    return Outcome(
        frozen=frozen,
        trainable=total - frozen,
        moved=len(learning) - len(still),
        still=sorted(names[key] for key in still),
    )
