"""Hugging Face weights under frostlab's names, so that both models give the same numbers.

GPT from GPT-2 (`t` is transposed: GPT-2 keeps its matrices as (in, out)):

    tokens, positions            wte, wpe
    blocks.N.norm1, norm2        h.N.ln_1, h.N.ln_2
    blocks.N.qkv, out            h.N.attn.c_attn (t), h.N.attn.c_proj (t)
    blocks.N.up, down            h.N.mlp.c_fc (t), h.N.mlp.c_proj (t)
    norm, head                   ln_f, lm_head (tied to wte)

Decoder from Llama:

    tokens, head, norm           embed_tokens, lm_head, norm
    blocks.N.query … out         layers.N.self_attn.q_proj … o_proj
    blocks.N.gate, up, down      layers.N.mlp.gate_proj, up_proj, down_proj
    blocks.N.norm1, norm2        layers.N.input_layernorm, post_attention_layernorm
"""

import re
from collections.abc import Mapping

from torch import Tensor

from frostlab.errors import BadInput

_GPT2 = {
    r"(?:transformer\.)?wte": "tokens",
    r"(?:transformer\.)?wpe": "positions",
    r"(?:transformer\.)?h\.(\d+)\.ln_([12])": r"blocks.\1.norm\2",
    r"(?:transformer\.)?h\.(\d+)\.attn\.c_attn": r"blocks.\1.qkv",
    r"(?:transformer\.)?h\.(\d+)\.attn\.c_proj": r"blocks.\1.out",
    r"(?:transformer\.)?h\.(\d+)\.mlp\.c_fc": r"blocks.\1.up",
    r"(?:transformer\.)?h\.(\d+)\.mlp\.c_proj": r"blocks.\1.down",
    r"(?:transformer\.)?ln_f": "norm",
    r"lm_head": "head",
}
_LLAMA = {
    r"model\.embed_tokens": "tokens",
    r"model\.norm": "norm",
    r"lm_head": "head",
    r"model\.layers\.(\d+)\.self_attn\.q_proj": r"blocks.\1.query",
    r"model\.layers\.(\d+)\.self_attn\.k_proj": r"blocks.\1.key",
    r"model\.layers\.(\d+)\.self_attn\.v_proj": r"blocks.\1.value",
    r"model\.layers\.(\d+)\.self_attn\.o_proj": r"blocks.\1.out",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj": r"blocks.\1.\2",
    r"model\.layers\.(\d+)\.input_layernorm": r"blocks.\1.norm1",
    r"model\.layers\.(\d+)\.post_attention_layernorm": r"blocks.\1.norm2",
}
_TRANSPOSED = ("qkv", "out", "up", "down")


def gpt_from_gpt2(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A GPT-2 state dict as one of frostlab's GPT."""
    named = _renamed(state, _GPT2)
    return {
        name: value.t() if name.split(".")[-2] in _TRANSPOSED and value.ndim == 2 else value
        for name, value in named.items()
    }


def decoder_from_llama(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Llama state dict as one of frostlab's Decoder with its norms before and a final one."""
    return _renamed(state, _LLAMA)


def _renamed(state: Mapping[str, Tensor], table: dict[str, str]) -> dict[str, Tensor]:
    return {_new_name(name, table): value for name, value in state.items()}


def _new_name(name: str, table: dict[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    for pattern, new in table.items():
        if match := re.fullmatch(pattern, stem):
            return f"{match.expand(new)}.{kind}"
    raise BadInput(f"{name} has no place in frostlab's model")
