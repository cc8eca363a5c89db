"""Tables of decoders: GPT, Llama and their relatives.

Each table maps parameter paths to roles; `frostlab.roles.description` defines the patterns.
"""

from typing import Any

from frostlab.roles.architectures.common import GATE_UP, QKV, QKV_PER_HEAD, config_heads, under
from frostlab.roles.description import Description, Entry, Fused, Table, register
from frostlab.roles.parts import Heads

GPT_EMBEDDINGS: Table = {  # embeddings and norms, with the same paths in several models
    "wte": "embedding",
    "wpe": "position",
    "ln_f": "norm",
    "h.{i}.ln_1": "norm",
    "h.{i}.ln_2": "norm",
}
GPT2: Table = {
    **GPT_EMBEDDINGS,
    "h.{i}.attn.c_attn": QKV,
    "h.{i}.attn.c_proj": "output",
    "h.{i}.crossattention.q_attn": "cross.query",
    "h.{i}.crossattention.c_attn": Fused(("key", "value"), cross=True),
    "h.{i}.crossattention.c_proj": "cross.output",
    "h.{i}.ln_cross_attn": "norm",
    "h.{i}.mlp.c_fc": "up",
    "h.{i}.mlp.c_proj": "down",
}
register("gpt2", Description(GPT2, config_heads))

GPT_NEO: Table = {
    **GPT_EMBEDDINGS,
    "h.{i}.attn.attention.q_proj": "query",
    "h.{i}.attn.attention.k_proj": "key",
    "h.{i}.attn.attention.v_proj": "value",
    "h.{i}.attn.attention.out_proj": "output",
    "h.{i}.mlp.c_fc": "up",
    "h.{i}.mlp.c_proj": "down",
}
register("gpt_neo", Description(GPT_NEO, config_heads))

GPTJ: Table = {
    **GPT_EMBEDDINGS,
    "h.{i}.attn.q_proj": "query",
    "h.{i}.attn.k_proj": "key",
    "h.{i}.attn.v_proj": "value",
    "h.{i}.attn.out_proj": "output",
    "h.{i}.mlp.fc_in": "up",
    "h.{i}.mlp.fc_out": "down",
}
register("gptj", Description(GPTJ, config_heads))


def bigcode(module: Any) -> Table:
    """Return GPT-BigCode's table; the roles are interleaved unless attention is multi-query."""
    layer: dict[str, Entry] = {
        "attn.c_attn": QKV if module.config.multi_query else QKV_PER_HEAD,
        "attn.c_proj": "output",
        "mlp.c_fc": "up",
        "mlp.c_proj": "down",
    }
    return {**GPT_EMBEDDINGS, **under("h.{i}", layer)}


def bigcode_heads(module: Any, stack: str) -> Heads:
    """Return GPT-BigCode's heads; multi-query attention has only one key/value head."""
    config = module.config
    count = config.num_attention_heads
    return Heads(count, 1 if config.multi_query else count, config.hidden_size // count)


register("gpt_bigcode", Description(bigcode, bigcode_heads))

NEOX_FEED_FORWARD: Table = {"mlp.dense_h_to_4h": "up", "mlp.dense_4h_to_h": "down"}
GPT_NEOX: Table = {
    "embed_in": "embedding",
    "layers.{i}.attention.query_key_value": QKV_PER_HEAD,
    "layers.{i}.attention.dense": "output",
    "layers.{i}.input_layernorm": "norm",
    "layers.{i}.post_attention_layernorm": "norm",
    **under("layers.{i}", NEOX_FEED_FORWARD),
    "final_layer_norm": "norm",
}
register("gpt_neox", Description(GPT_NEOX, config_heads))

BLOOM: Table = {
    "word_embeddings": "embedding",
    "word_embeddings_layernorm": "norm",
    "h.{i}.self_attention.query_key_value": QKV_PER_HEAD,
    "h.{i}.self_attention.dense": "output",
    "h.{i}.input_layernorm": "norm",
    "h.{i}.post_attention_layernorm": "norm",
    **under("h.{i}", NEOX_FEED_FORWARD),
    "ln_f": "norm",
}
register("bloom", Description(BLOOM, config_heads))


def falcon(module: Any) -> Table:
    """Return Falcon's table; the roles are interleaved unless there is only one key/value head."""
    config = module.config
    one_kv = config.multi_query and not config.new_decoder_architecture
    return {
        "word_embeddings": "embedding",
        "h.{i}.self_attention.query_key_value": QKV if one_kv else QKV_PER_HEAD,
        "h.{i}.self_attention.dense": "output",
        "h.{i}.input_layernorm": "norm",
        "h.{i}.post_attention_layernorm": "norm",
        "h.{i}.ln_attn": "norm",
        "h.{i}.ln_mlp": "norm",
        **under("h.{i}", NEOX_FEED_FORWARD),
        "ln_f": "norm",
    }


def falcon_heads(module: Any, stack: str) -> Heads:
    """Return Falcon's heads; the number of key/value heads depends on the config."""
    config = module.config
    count = config.num_attention_heads
    if config.new_decoder_architecture:
        kv = config.num_kv_heads
    else:
        kv = 1 if config.multi_query else count
    return Heads(count, kv, config.hidden_size // count)


register("falcon", Description(falcon, falcon_heads))

MPT: Table = {
    "wte": "embedding",
    "blocks.{i}.attn.Wqkv": QKV,
    "blocks.{i}.attn.out_proj": "output",
    "blocks.{i}.norm_1": "norm",
    "blocks.{i}.norm_2": "norm",
    "blocks.{i}.ffn.up_proj": "up",
    "blocks.{i}.ffn.down_proj": "down",
    "norm_f": "norm",
}
register("mpt", Description(MPT, config_heads))

SEPARATE: Table = {
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
}
OPT: Table = {
    "decoder.embed_tokens": "embedding",
    "decoder.embed_positions": "position",
    "decoder.project_in": "embedding",
    "decoder.project_out": "head",
    "decoder.final_layer_norm": "norm",
    **under("decoder.layers.{i}", SEPARATE),
    "decoder.layers.{i}.self_attn.out_proj": "output",
    "decoder.layers.{i}.self_attn_layer_norm": "norm",
    "decoder.layers.{i}.fc1": "up",
    "decoder.layers.{i}.fc2": "down",
    "decoder.layers.{i}.final_layer_norm": "norm",
}
register("opt", Description(OPT, config_heads))

LLAMA: Table = {
    "embed_tokens": "embedding",
    **under("layers.{i}", SEPARATE),
    "layers.{i}.self_attn.o_proj": "output",
    "layers.{i}.self_attn.q_norm": "norm",
    "layers.{i}.self_attn.k_norm": "norm",
    "layers.{i}.mlp.gate_proj": "gate",
    "layers.{i}.mlp.up_proj": "up",
    "layers.{i}.mlp.down_proj": "down",
    "layers.{i}.input_layernorm": "norm",
    "layers.{i}.post_attention_layernorm": "norm",
    "layers.{i}.pre_feedforward_layernorm": "norm",
    "layers.{i}.post_feedforward_layernorm": "norm",
    "norm": "norm",
}
for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma2"):
    register(kind, Description(LLAMA, config_heads))

PHI: Table = {
    "embed_tokens": "embedding",
    **under("layers.{i}", SEPARATE),
    "layers.{i}.self_attn.dense": "output",
    "layers.{i}.self_attn.q_layernorm": "norm",
    "layers.{i}.self_attn.k_layernorm": "norm",
    "layers.{i}.mlp.fc1": "up",
    "layers.{i}.mlp.fc2": "down",
    "layers.{i}.input_layernorm": "norm",
    "final_layernorm": "norm",
}
register("phi", Description(PHI, config_heads))

PHI3: Table = {
    "embed_tokens": "embedding",
    "layers.{i}.self_attn.qkv_proj": QKV,
    "layers.{i}.self_attn.o_proj": "output",
    "layers.{i}.mlp.gate_up_proj": GATE_UP,
    "layers.{i}.mlp.down_proj": "down",
    "layers.{i}.input_layernorm": "norm",
    "layers.{i}.post_attention_layernorm": "norm",
    "norm": "norm",
}
register("phi3", Description(PHI3, config_heads))
