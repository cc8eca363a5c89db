"""frostlab's GPT and Decoder as Hugging Face models with the same logits.

GPT for language → GPT-2 (`t`: transposed, because GPT-2 keeps matrices as (in, out)):

    tokens, positions            transformer.wte, wpe
    blocks.N.norm1, norm2        transformer.h.N.ln_1, ln_2
    blocks.N.qkv, out            transformer.h.N.attn.c_attn (t), c_proj (t)
    blocks.N.up, down            transformer.h.N.mlp.c_fc (t), c_proj (t)
    norm, head                   transformer.ln_f, lm_head

Decoder → Llama:

    tokens, norm, head           model.embed_tokens, model.norm, lm_head
    blocks.N.query … out         model.layers.N.self_attn.q_proj, k_proj, v_proj, o_proj
    blocks.N.gate, up, down      model.layers.N.mlp.gate_proj, up_proj, down_proj
    blocks.N.norm1, norm2        model.layers.N.input_layernorm, post_attention_layernorm

Decoder with qk_norm → Qwen3, with the same names as Llama and these:

    blocks.N.qk_norm.query, key  model.layers.N.self_attn.q_norm, k_norm

GPT for classification → MegatronBERT, which also has pre-norm blocks, learned positions and a final
norm, and attends in both directions (or, as a decoder, causally):

    tokens, positions            embeddings.word_embeddings, position_embeddings
    blocks.N.norm1, norm2        encoder.layer.N.attention.ln, encoder.layer.N.ln
    blocks.N.qkv                 encoder.layer.N.attention.self.query, key, value
    blocks.N.out                 encoder.layer.N.attention.output.dense
    blocks.N.up, down            encoder.layer.N.intermediate.dense, encoder.layer.N.output.dense
    norm                         encoder.ln

No MegatronBERT class has a linear head on the mean over the tokens or on the last token, so the
head of a classifier is returned separately. Biases and token types that frostlab's model does not
have are zero.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.errors import BadInput
from frostlab.models.decoder import Decoder
from frostlab.models.gpt import GPT

_LAYER_NORM_EPS = 1e-5  # the default of nn.LayerNorm, which GPT uses
_DEFAULT_LENGTH = 2048  # positions of a Llama or Qwen3 if no length is given
_GPT2 = {
    r"tokens": "transformer.wte",
    r"positions": "transformer.wpe",
    r"blocks\.(\d+)\.norm([12])": r"transformer.h.\1.ln_\2",
    r"blocks\.(\d+)\.qkv": r"transformer.h.\1.attn.c_attn",
    r"blocks\.(\d+)\.out": r"transformer.h.\1.attn.c_proj",
    r"blocks\.(\d+)\.up": r"transformer.h.\1.mlp.c_fc",
    r"blocks\.(\d+)\.down": r"transformer.h.\1.mlp.c_proj",
    r"norm": "transformer.ln_f",
    r"head": "lm_head",
}
_LLAMA = {
    r"tokens": "model.embed_tokens",
    r"norm": "model.norm",
    r"head": "lm_head",
    r"blocks\.(\d+)\.query": r"model.layers.\1.self_attn.q_proj",
    r"blocks\.(\d+)\.key": r"model.layers.\1.self_attn.k_proj",
    r"blocks\.(\d+)\.value": r"model.layers.\1.self_attn.v_proj",
    r"blocks\.(\d+)\.out": r"model.layers.\1.self_attn.o_proj",
    r"blocks\.(\d+)\.(gate|up|down)": r"model.layers.\1.mlp.\2_proj",
    r"blocks\.(\d+)\.norm1": r"model.layers.\1.input_layernorm",
    r"blocks\.(\d+)\.norm2": r"model.layers.\1.post_attention_layernorm",
    r"blocks\.(\d+)\.qk_norm\.query": r"model.layers.\1.self_attn.q_norm",
    r"blocks\.(\d+)\.qk_norm\.key": r"model.layers.\1.self_attn.k_norm",
}
_MEGATRON = {
    r"tokens": "embeddings.word_embeddings",
    r"positions": "embeddings.position_embeddings",
    r"blocks\.(\d+)\.norm1": r"encoder.layer.\1.attention.ln",
    r"blocks\.(\d+)\.norm2": r"encoder.layer.\1.ln",
    r"blocks\.(\d+)\.(query|key|value)": r"encoder.layer.\1.attention.self.\2",
    r"blocks\.(\d+)\.out": r"encoder.layer.\1.attention.output.dense",
    r"blocks\.(\d+)\.up": r"encoder.layer.\1.intermediate.dense",
    r"blocks\.(\d+)\.down": r"encoder.layer.\1.output.dense",
    r"norm": "encoder.ln",
}


@dataclass(frozen=True)
class Converted:
    """A model of transformers, and the head that its class cannot hold."""

    model: Any
    head: Tensor | None = None  # (classes, width); its input: see `GPTConfig.pooling`


def is_own(model: nn.Module) -> bool:
    """Return whether a model is a GPT or a Decoder of frostlab."""
    return type(model) in (GPT, Decoder)


def as_huggingface(
    model: nn.Module, *, pad: int | None = None, end: int | None = None, length: int | None = None
) -> Converted:
    """Return a copy of frostlab's GPT or Decoder as a model of transformers, with the same logits.

    A setting that transformers' class cannot express is refused.

    Args:
        pad: the padding token.
        end: the token between texts; it becomes both the BOS and the EOS token.
        length: the number of positions of a Llama or Qwen3 (default: 2048), usually the tokens of
            the longest text in training.
    """
    special = {"pad_token_id": pad, "bos_token_id": end, "eos_token_id": end}
    if isinstance(model, GPT) and model.config.qk_norm:
        raise BadInput(
            "export: neither GPT-2 nor MegatronBERT can express model.qk_norm true; "
            "frostlab itself can evaluate, predict and generate with this model"
        )
    with torch.random.fork_rng(devices=[]):
        if isinstance(model, Decoder):
            converted = Converted(_llama(model, special, length or _DEFAULT_LENGTH))
        elif isinstance(model, GPT) and model.config.classes:
            head = model.head.weight.detach().cpu().clone()
            converted = Converted(_megatron(model, special), head)
        else:
            assert isinstance(model, GPT)
            converted = Converted(_gpt2(model, special))
    converted.model.eval()
    return converted


def _gpt2(model: GPT, special: dict[str, int | None]) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = model.config
    if not config.causal:
        raise BadInput("export: GPT-2 is causal, but model.causal is false in this language model")
    made = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocabulary,
            n_positions=config.positions,
            n_embd=config.width,
            n_layer=len(model.blocks),
            n_head=config.heads,
            n_inner=config.hidden,
            activation_function="gelu_new",
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            layer_norm_epsilon=_LAYER_NORM_EPS,
            tie_word_embeddings=model.head.weight is model.tokens.weight,
            **special,
        )
    )
    matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    state = _renamed(model.state_dict(), _GPT2)
    _load(made, {name: v.t() if name.endswith(matrices) else v for name, v in state.items()})
    return made


def _llama(model: Decoder, special: dict[str, int | None], length: int) -> Any:
    """Return a decoder as a Llama, or with `qk_norm` as a Qwen3."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = model.config
    name, config_class, model_class = "Llama", LlamaConfig, LlamaForCausalLM
    only_llama: dict[str, Any] = {"mlp_bias": False}
    if config.qk_norm:
        name, config_class, model_class = "Qwen3", Qwen3Config, Qwen3ForCausalLM
        only_llama = {}
    for setting, value, expected in (
        ("norm", config.norm, "before"),
        ("final_norm", config.final_norm, True),
    ):
        if value != expected:
            shown, wanted = (str(x).lower() for x in (value, expected))
            raise BadInput(
                f"export: {name} cannot express model.{setting} {shown}, only {wanted}; "
                "frostlab itself can evaluate, predict and generate with this model"
            )
    made = model_class(
        config_class(
            vocab_size=config.vocabulary,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=len(model.blocks),
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            head_dim=config.width // config.heads,
            hidden_act="silu",
            max_position_embeddings=length,
            rms_norm_eps=config.eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rotary_base},
            attention_bias=False,
            attention_dropout=0.0,
            **only_llama,
            tie_word_embeddings=model.head.weight is model.tokens.weight,
            **special,
        )
    )
    _load(made, _renamed(model.state_dict(), _LLAMA))
    return made


def _megatron(model: GPT, special: dict[str, int | None]) -> Any:
    import transformers
    from transformers import MegatronBertConfig, MegatronBertModel

    config = model.config
    made = MegatronBertModel(
        MegatronBertConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.width,
            num_hidden_layers=len(model.blocks),
            num_attention_heads=config.heads,
            intermediate_size=config.hidden,
            hidden_act="gelu_new",
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.dropout,
            max_position_embeddings=config.positions,
            type_vocab_size=2,
            layer_norm_eps=_LAYER_NORM_EPS,
            is_decoder=config.causal,
            num_labels=config.classes,
            **special,
        ),
        add_pooling_layer=False,
    )
    if config.causal and not _is_causal(made):
        raise BadInput(
            f"export: MegatronBERT in transformers {transformers.__version__} attends in both "
            "directions although this model is causal; transformers 5.18 and later attend causally"
        )
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if ".qkv." in name:
            for role, rows in zip(("query", "key", "value"), value.chunk(3), strict=True):
                state[name.replace("qkv", role)] = rows
        elif name != "head.weight":
            state[name] = value
    _load(made, _renamed(state, _MEGATRON))
    return made


@torch.no_grad()
def _is_causal(made: Any) -> bool:
    """Return whether what a model computes for its first token ignores the second token.

    From version 5.9 to 5.17, transformers' MegatronBERT ignored `is_decoder`.
    """
    if made.config.max_position_embeddings < 2 or made.config.vocab_size < 2:
        return True
    first, other = made.eval()(torch.tensor([[0, 0], [0, 1]])).last_hidden_state[:, 0]
    return torch.allclose(first, other, rtol=1e-3, atol=1e-4)


def _renamed(state: Mapping[str, Tensor], table: dict[str, str]) -> dict[str, Tensor]:
    """Return tensors under the names that a table gives to the modules that hold them."""
    return {_new_name(name, table): value for name, value in state.items()}


def _new_name(name: str, table: dict[str, str]) -> str:
    module, _, local = name.rpartition(".")
    for pattern, new in table.items():
        if match := re.fullmatch(pattern, module):
            return f"{match.expand(new)}.{local}"
    raise BadInput(f"export: {name} has no counterpart in transformers' model")


def _load(made: Any, state: dict[str, Tensor]) -> None:
    """Load all tensors; biases and token types that frostlab's model lacks become zero."""
    own = made.to(next(iter(state.values())).dtype).state_dict()
    absent = {
        name: torch.zeros_like(value)
        for name, value in own.items()
        if name not in state and (name.endswith(".bias") or "token_type" in name)
    }
    made.load_state_dict({**absent, **state})
