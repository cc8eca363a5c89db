"""Every architecture that is claimed, as a small model with inputs: the tests' ground."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from cases import slow_unless
from frostlab.models.conformer import Conformer, ConformerConfig
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.roles.read import survey

Inputs = dict[str, Tensor]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = SIZES | {"num_key_value_heads": 2}
GPT_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64} | SPECIAL
TWO_SIDED = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 99,
    "decoder_start_token_id": 1,
} | SPECIAL
SOUND = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 32,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 8,
}


def words(batch: int = 2, length: int = 6) -> Tensor:
    return torch.randint(3, 99, (batch, length))


def text() -> Inputs:
    return {"input_ids": words()}


def pair() -> Inputs:
    return {"input_ids": words(), "decoder_input_ids": words(length=5)}


def image() -> Inputs:
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def image_and_text() -> Inputs:
    return text() | image()


def spectrogram() -> Inputs:
    return {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": words(length=5)}


def sound() -> Inputs:
    return {"input_values": torch.randn(2, 400)}


@dataclass(frozen=True)
class Case:
    """One architecture or one of its layouts."""

    kind: str  # Hugging Face model type
    config: dict[str, Any]
    inputs: Callable[[], Inputs] = text

    def make_config(self) -> Any:
        return AutoConfig.for_model(self.kind, **self.config)

    def build(self) -> PreTrainedModel:
        torch.manual_seed(0)
        model = AutoModel.from_config(self.make_config(), attn_implementation="eager")
        widen(model)
        return model.eval()


@torch.no_grad()
def widen(model: nn.Module) -> None:
    """Give every parameter values far from zero and from each other, biases too."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * 0.2)


CASES: dict[str, Case] = {
    "bert": Case("bert", SIZES),
    "roberta": Case("roberta", SIZES),
    "distilbert": Case(
        "distilbert",
        {
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "vocab_size": 99,
            "max_position_embeddings": 64,
        },
    ),
    "albert": Case("albert", SIZES | {"embedding_size": 16}),
    "electra": Case("electra", SIZES | {"embedding_size": 16}),
    "deberta-v2": Case(
        "deberta-v2",
        SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "conv_kernel_size": 3},
    ),
    "mpnet": Case("mpnet", SIZES),
    "xlm-roberta": Case("xlm-roberta", SIZES),
    "modernbert": Case("modernbert", SIZES | SPECIAL | {"cls_token_id": 1, "sep_token_id": 2}),
    "gpt2": Case("gpt2", GPT_SIZES),
    "gpt_neo": Case(
        "gpt_neo",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 99,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
        }
        | SPECIAL,
    ),
    "gpt_neox": Case("gpt_neox", SIZES | SPECIAL),
    "gptj": Case("gptj", GPT_SIZES | {"rotary_dim": 4}),
    "opt": Case(
        "opt",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "vocab_size": 99,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 16,
        }
        | SPECIAL,
    ),
    "bloom": Case("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}),
    "falcon": Case(
        "falcon",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 99,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "bias": True,
        }
        | SPECIAL,
    ),
    "mpt": Case("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 99}),
    "gpt_bigcode": Case("gpt_bigcode", GPT_SIZES | {"multi_query": True}),
    "llama": Case("llama", GROUPED),
    "mistral": Case("mistral", GROUPED),
    "qwen2": Case("qwen2", GROUPED),
    "qwen3": Case("qwen3", GROUPED | {"head_dim": 16}),
    "gemma2": Case("gemma2", GROUPED | {"head_dim": 8}),
    "phi": Case("phi", SIZES | {"qk_layernorm": True}),
    "phi3": Case("phi3", GROUPED | SPECIAL),
    "t5": Case(
        "t5",
        {
            "d_model": 32,
            "num_layers": 2,
            "num_heads": 4,
            "d_ff": 64,
            "d_kv": 8,
            "vocab_size": 99,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
        },
        pair,
    ),
    "bart": Case("bart", TWO_SIDED | {"max_position_embeddings": 64}, pair),
    "vit": Case("vit", VISION, image),
    "clip": Case(
        "clip",
        {"text_config": SIZES | SPECIAL, "vision_config": VISION, "projection_dim": 16},
        image_and_text,
    ),
    "whisper": Case(
        "whisper",
        TWO_SIDED | {"max_source_positions": 16, "max_target_positions": 16, "num_mel_bins": 8},
        spectrogram,
    ),
    "wav2vec2": Case("wav2vec2", SOUND, sound),
    "wav2vec2-conformer": Case(
        "wav2vec2-conformer",
        SOUND | {"conv_depthwise_kernel_size": 5, "position_embeddings_type": "relative"},
        sound,
    ),
    "clip_text_model": Case("clip_text_model", SIZES | SPECIAL),
    "clip_vision_model": Case("clip_vision_model", VISION, image),
}

# Other layouts of the same architectures.
VARIANTS: dict[str, Case] = {
    "albert-two-groups": Case(
        "albert",
        SIZES | {"embedding_size": 16, "num_hidden_layers": 4, "num_hidden_groups": 2},
    ),
    "bert-two-heads": Case("bert", SIZES | {"num_attention_heads": 2}),
    "deberta-v2-shared": Case(
        "deberta-v2",
        SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True},
    ),
    "distilbert-sinusoidal": Case(
        "distilbert", CASES["distilbert"].config | {"sinusoidal_pos_embds": True}
    ),
    "falcon-one-kv": Case(
        "falcon",
        CASES["falcon"].config | {"new_decoder_architecture": False, "multi_query": True},
    ),
    "falcon-per-head": Case(
        "falcon",
        CASES["falcon"].config
        | {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4},
    ),
    "gpt_bigcode-per-head": Case("gpt_bigcode", GPT_SIZES | {"multi_query": False}),
    "llama-biased": Case("llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "opt-wide": Case("opt", CASES["opt"].config | {"word_embed_proj_dim": 32}),
    "t5-ungated": Case("t5", CASES["t5"].config | {"feed_forward_proj": "relu"}, pair),
    "t5-wide-heads": Case("t5", CASES["t5"].config | {"d_kv": 48}, pair),
    "wav2vec2-stable": Case("wav2vec2", SOUND | {"do_stable_layer_norm": True}, sound),
}
ALL = CASES | VARIANTS


class TorchModel(nn.Module):
    """torch's own encoder and decoder, called as a program would."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says which inference path it will not take
            self.inner = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True, bias=bias)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.inner(source, target)


OWN_SIZES = {"vocabulary": 99, "width": 32, "layers": 2, "heads": 4, "hidden": 64}
GPT_OWN = GPTConfig(**OWN_SIZES, positions=64, dropout=0.0)
CONFORMER = ConformerConfig(
    channels=5, subjects=3, width=32, layers=2, heads=4, hidden=64, kernel=5, dropout=0.0
)


def vectors() -> Inputs:
    return {"source": torch.randn(2, 6, 32), "target": torch.randn(2, 5, 32)}


def recordings() -> Inputs:
    """EEG of a subject that was trained on, and of one that was not."""
    return {"eeg": torch.randn(2, 12, 5), "subject": torch.tensor([1, -1])}


# Models without a Hugging Face model type: frostlab's and torch's.
OWN: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "gpt": (lambda: GPT(GPT_OWN), text),
    "gpt-classifier": (lambda: GPT(replace(GPT_OWN, causal=False, classes=3)), text),
    "decoder": (lambda: Decoder(DecoderConfig(**OWN_SIZES)), text),
    "decoder-norm-first": (
        lambda: Decoder(DecoderConfig(**OWN_SIZES, norm="before", final_norm=True)),
        text,
    ),
    "gpt-qk-norm": (lambda: GPT(replace(GPT_OWN, qk_norm=True)), text),
    "decoder-qk-norm": (lambda: Decoder(DecoderConfig(**OWN_SIZES, qk_norm=True)), text),
    "conformer": (lambda: Conformer(CONFORMER), recordings),
    "conformer-relative": (
        lambda: Conformer(
            replace(CONFORMER, attention="relative", norm="layer", residual="none", head="linear")
        ),
        recordings,
    ),
    "conformer-published": (
        lambda: Conformer(replace(CONFORMER, variant="published")),
        recordings,
    ),
    "torch": (TorchModel, vectors),
    "torch-unbiased": (lambda: TorchModel(bias=False), vectors),
}
EVERY = (*ALL, *OWN)
# One architecture for each way in which weights lie: apart, shared, fused one after another, fused
# per head, grouped, one key for all, with an encoder beside, as images or sound. The others are of
# one of these layouts; what is done with a layout is tested on them in the slow tests.
LAYOUTS = {
    "bert", "albert", "deberta-v2", "gpt2", "gpt_neox", "falcon", "falcon-one-kv", "gpt_bigcode",
    "llama", "phi3", "t5", "whisper", "clip", "wav2vec2-conformer", "gpt",
    "gpt-qk-norm", "decoder", "conformer", "conformer-published", "torch",
}  # fmt: skip


def slow_unless_layout(names: Iterable[str] = EVERY) -> list[Any]:
    """Parameters of a test: one name a layout by default, every name in the slow tests."""
    return slow_unless(LAYOUTS, names)


def build(name: str) -> tuple[nn.Module, Inputs]:
    """Build a model of the zoo by name, and inputs for it."""
    if name in ALL:
        return ALL[name].build(), ALL[name].inputs()
    torch.manual_seed(0)
    make, inputs = OWN[name]
    model = make()
    widen(model)
    return model.eval(), inputs()


def exactly(name: str) -> tuple[nn.Module, Inputs]:
    """The same in float64, where another order of the same sums stays below 1e-10."""
    model, inputs = build(name)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    return model.double(), wide


def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Every floating-point tensor a model returns."""
    result = model(**inputs)
    if isinstance(result, Tensor):
        return [result]
    values = result.values() if isinstance(result, dict) else result
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def loss_of(model: nn.Module, inputs: Inputs) -> Tensor:
    """A loss that every model can be trained on."""
    found = outputs(model, inputs)
    return sum(  # type: ignore[return-value]
        o.to(torch.promote_types(o.dtype, torch.float32)).square().mean() for o in found
    )


def grads(model: nn.Module) -> dict[str, Tensor]:
    """Gradients under canonical names, zeros where a parameter has none."""
    found = {}
    _, slots = survey(model)
    for slot in slots.values():
        whole = torch.zeros(slot.shape, dtype=slot.pieces[0].parameter.dtype)
        for piece in slot.pieces:
            if piece.parameter.grad is not None and slot.shape:
                piece.rows.put(whole, piece.parameter.grad, slot.axis)
        found[slot.name] = whole
    return found
