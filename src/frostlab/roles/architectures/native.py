"""Tables of torch's own transformer modules and of frostlab's models.

Each table maps parameter paths to roles; `frostlab.roles.description` defines the patterns.
"""

from typing import Any

from torch import nn

from frostlab.models.conformer import Conformer
from frostlab.models.decoder import Decoder
from frostlab.models.gpt import GPT
from frostlab.roles.architectures.common import QKV, cross, under
from frostlab.roles.description import Description, Table, register
from frostlab.roles.parts import Heads

MULTIHEAD: Table = {
    "in_proj_weight": QKV,
    "in_proj_bias": QKV,
    "q_proj_weight": "query",  # these three exist if keys or values have their own width
    "k_proj_weight": "key",
    "v_proj_weight": "value",
    "bias_k": "other",  # an extra key and value, with add_bias_kv=True
    "bias_v": "other",
    "out_proj": "output",
}
TORCH_ENCODER_LAYER: Table = {
    **under("self_attn", MULTIHEAD),
    "linear1": "up",
    "linear2": "down",
    "norm1": "norm",
    "norm2": "norm",
}
TORCH_DECODER_LAYER: Table = {
    **TORCH_ENCODER_LAYER,
    **under("multihead_attn", cross(MULTIHEAD)),
    "norm3": "norm",
}
TORCH_ENCODER: Table = {**under("layers.{i}", TORCH_ENCODER_LAYER), "norm": "norm"}
TORCH_DECODER: Table = {**under("layers.{i}", TORCH_DECODER_LAYER), "norm": "norm"}
TORCH_TRANSFORMER: Table = {
    **under("encoder", TORCH_ENCODER),
    **under("decoder", TORCH_DECODER),
}


def multihead_heads(module: Any, stack: str) -> Heads:
    """Return the heads of the first `nn.MultiheadAttention` in a stack, which stands for all."""
    modules = module.get_submodule(stack).modules()
    attention = next(m for m in modules if isinstance(m, nn.MultiheadAttention))
    return Heads(attention.num_heads, attention.num_heads, attention.head_dim)


TORCH_STACKS = {"encoder": "encoder", "decoder": "decoder"}
register(nn.MultiheadAttention, Description(MULTIHEAD, multihead_heads))
register(nn.TransformerEncoderLayer, Description(TORCH_ENCODER_LAYER, multihead_heads))
register(nn.TransformerDecoderLayer, Description(TORCH_DECODER_LAYER, multihead_heads))
register(nn.TransformerEncoder, Description(TORCH_ENCODER, multihead_heads))
register(nn.TransformerDecoder, Description(TORCH_DECODER, multihead_heads))
register(nn.Transformer, Description(TORCH_TRANSFORMER, multihead_heads, TORCH_STACKS))


def own_heads(module: Any, stack: str) -> Heads:
    """Return the heads of frostlab's models."""
    config = module.config
    return Heads(config.heads, config.heads, config.width // config.heads)


GPT_TABLE: Table = {
    "tokens": "embedding",
    "positions": "position",
    "blocks.{i}.norm1": "norm",
    "blocks.{i}.qkv": QKV,
    "blocks.{i}.qk_norm.*": "norm",
    "blocks.{i}.out": "output",
    "blocks.{i}.norm2": "norm",
    "blocks.{i}.up": "up",
    "blocks.{i}.down": "down",
    "norm": "norm",
    "head": "head",
}
register(GPT, Description(GPT_TABLE, own_heads))

DECODER_TABLE: Table = {
    "tokens": "embedding",
    "blocks.{i}.query": "query",
    "blocks.{i}.key": "key",
    "blocks.{i}.value": "value",
    "blocks.{i}.qk_norm.*": "norm",
    "blocks.{i}.out": "output",
    "blocks.{i}.gate": "gate",
    "blocks.{i}.up": "up",
    "blocks.{i}.down": "down",
    "blocks.{i}.norm1": "norm",
    "blocks.{i}.norm2": "norm",
    "norm": "norm",
    "head": "head",
}
register(Decoder, Description(DECODER_TABLE, own_heads))

FEED_FORWARD: Table = {"norm": "norm", "up": "up", "down": "down"}
CONFORMER_LAYER: Table = {
    **under("feed1", FEED_FORWARD),
    "attention.norm": "norm",
    "attention.qkv": QKV,
    "attention.out": "output",
    "attention.position": "position",  # these three only with attention="relative"
    "attention.content_bias": "position",
    "attention.place_bias": "position",
    "attention.relative_positions": "position",  # only with variant="published"
    "convolution.norm": "norm",
    "convolution.enter": "conv",
    "convolution.depthwise": "conv",
    "convolution.middle": "norm",
    "convolution.leave": "conv",
    **under("feed2", FEED_FORWARD),
    "norm": "norm",
}
CONFORMER_TABLE: Table = {
    "cnn.*.conv": "conv",
    "cnn.*.norm": "norm",
    "channels.**": "other",  # channel attention
    "subjects": "embedding",
    **under("blocks.{i}", CONFORMER_LAYER),
    "gate.**": "gate",  # gate of the residual connection around the stack
    "head.**": "head",
}
register(Conformer, Description(CONFORMER_TABLE, own_heads))
