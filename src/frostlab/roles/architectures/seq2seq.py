"""Tables of models with two stacks (T5, BART, Whisper, CLIP), and of image and sound encoders.

Each table maps parameter paths to roles; `frostlab.roles.description` defines the patterns.
"""

from typing import Any

from frostlab.roles.architectures.common import (
    config_heads,
    cross,
    encoder_decoder_heads,
    heads_from,
    under,
)
from frostlab.roles.description import Description, Entry, Fixed, Table, register
from frostlab.roles.parts import Heads

ENCODER_DECODER = {"encoder": "encoder", "decoder": "decoder"}

T5_ATTENTION: Table = {"q": "query", "k": "key", "v": "value", "o": "output"}
T5_FEED_FORWARD: Table = {
    "wi": "up",  # without a gate
    "wi_0": "gate",
    "wi_1": "up",  # with a gate
    "wo": "down",
}


def t5_stack(feed_forward: int) -> dict[str, Entry]:
    """Return the table of a T5 stack.

    The first block holds the position bias that all blocks use. So its path has `*` in place of
    `{i}`: it belongs to no layer.

    Args:
        feed_forward: the index of the feed-forward network within a block.
    """
    return {
        "embed_tokens": "embedding",
        **under("block.{i}.layer.0.SelfAttention", T5_ATTENTION),
        "block.*.layer.0.SelfAttention.relative_attention_bias": "position",
        **under(f"block.{{i}}.layer.{feed_forward}.DenseReluDense", T5_FEED_FORWARD),
        "block.{i}.layer.*.layer_norm": "norm",
        "final_layer_norm": "norm",
    }


T5: Table = {
    "shared": "embedding",
    **under("encoder", t5_stack(feed_forward=1)),
    **under("decoder", t5_stack(feed_forward=2)),
    **under("decoder.block.{i}.layer.1.EncDecAttention", cross(T5_ATTENTION)),
    "lm_head": "head",
    "qa_outputs": "head",
}


def t5_heads(module: Any, stack: str) -> Heads:
    """Return T5's heads; their size is set separately from the model width."""
    config = module.config
    return Heads(config.num_heads, config.num_heads, config.d_kv)


register("t5", Description(T5, t5_heads, ENCODER_DECODER))

BART_ATTENTION: Table = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "output",
}
BART_LAYER: Table = {
    **under("layers.{i}.self_attn", BART_ATTENTION),
    **under("layers.{i}.encoder_attn", cross(BART_ATTENTION)),
    "layers.{i}.self_attn_layer_norm": "norm",
    "layers.{i}.encoder_attn_layer_norm": "norm",
    "layers.{i}.fc1": "up",
    "layers.{i}.fc2": "down",
    "layers.{i}.final_layer_norm": "norm",
}
BART_STACK: Table = {
    "embed_tokens": "embedding",
    "embed_positions": "position",
    "layernorm_embedding": "norm",
    **BART_LAYER,
}
BART: Table = {
    "shared": "embedding",
    **under("encoder", BART_STACK),
    **under("decoder", BART_STACK),
}
register("bart", Description(BART, encoder_decoder_heads, ENCODER_DECODER))

WHISPER: Table = {
    "encoder.conv1": "conv",
    "encoder.conv2": "conv",
    **under("encoder", BART_LAYER),
    "encoder.embed_positions": Fixed("position"),  # sinusoids
    "encoder.layer_norm": "norm",
    **under("decoder", BART_STACK),
    "decoder.layer_norm": "norm",
    "projector": "head",
    "classifier": "head",
    "layer_weights": "head",
}
register("whisper", Description(WHISPER, encoder_decoder_heads, ENCODER_DECODER))

CLIP_LAYERS: Table = {
    **under("encoder.layers.{i}.self_attn", BART_ATTENTION),
    "encoder.layers.{i}.layer_norm1": "norm",
    "encoder.layers.{i}.layer_norm2": "norm",
    "encoder.layers.{i}.mlp.fc1": "up",
    "encoder.layers.{i}.mlp.fc2": "down",
}
CLIP_TEXT: Table = {
    "embeddings.token_embedding": "embedding",
    "embeddings.position_embedding": "position",
    **CLIP_LAYERS,
    "final_layer_norm": "norm",
}
CLIP_VISION: Table = {
    "embeddings.class_embedding": "embedding",
    "embeddings.patch_embedding": "embedding",
    "embeddings.position_embedding": "position",
    "pre_layrnorm": "norm",  # transformers spells it this way
    **CLIP_LAYERS,
    "post_layernorm": "norm",
}
CLIP: Table = {
    **under("text_model", CLIP_TEXT),
    **under("vision_model", CLIP_VISION),
    "text_projection": "head",
    "visual_projection": "head",
    "classifier": "head",
    "logit_scale": "other",
}


def clip_heads(module: Any, stack: str) -> Heads:
    """Return a stack's heads from its part of the config, or from the config if it has no parts."""
    return heads_from(getattr(module.config, f"{stack}_config", module.config))


CLIP_STACKS = {"text_model": "text", "vision_model": "vision"}
register("clip", Description(CLIP, clip_heads, CLIP_STACKS))
# Models of one stack: paths begin with `text_model` or `vision_model` only if there is a head.
register("clip_text_model", Description({**CLIP, **CLIP_TEXT}, clip_heads, CLIP_STACKS))
register("clip_vision_model", Description({**CLIP, **CLIP_VISION}, clip_heads, CLIP_STACKS))

VIT: Table = {
    "embeddings.cls_token": "embedding",
    "embeddings.mask_token": "embedding",
    "embeddings.patch_embeddings.projection": "embedding",
    "embeddings.position_embeddings": "position",
    "layers.{i}.attention.q_proj": "query",
    "layers.{i}.attention.k_proj": "key",
    "layers.{i}.attention.v_proj": "value",
    "layers.{i}.attention.o_proj": "output",
    "layers.{i}.layernorm_before": "norm",
    "layers.{i}.layernorm_after": "norm",
    "layers.{i}.mlp.fc1": "up",
    "layers.{i}.mlp.fc2": "down",
    "layernorm": "norm",
    "pooler.**": "head",
}
register("vit", Description(VIT, config_heads))

SOUND: Table = {
    "masked_spec_embed": "embedding",
    "feature_extractor.conv_layers.*.conv": "conv",
    "feature_extractor.conv_layers.*.layer_norm": "norm",
    "feature_projection.layer_norm": "norm",
    "feature_projection.projection": "embedding",
    "encoder.pos_conv_embed.**": "position",
    "encoder.layer_norm": "norm",
    "encoder.layers.{i}.final_layer_norm": "norm",
    "adapter.**": "other",
}
SOUND_FEED_FORWARD: Table = {"intermediate_dense": "up", "output_dense": "down"}
WAV2VEC2: Table = {
    **SOUND,
    **under("encoder.layers.{i}.attention", BART_ATTENTION),
    "encoder.layers.{i}.layer_norm": "norm",
    **under("encoder.layers.{i}.feed_forward", SOUND_FEED_FORWARD),
    "encoder.layers.{i}.adapter_layer.**": "other",
}
register("wav2vec2", Description(WAV2VEC2, config_heads))

WAV2VEC2_CONFORMER: Table = {
    **SOUND,
    "encoder.layers.{i}.self_attn.linear_q": "query",
    "encoder.layers.{i}.self_attn.linear_k": "key",
    "encoder.layers.{i}.self_attn.linear_v": "value",
    "encoder.layers.{i}.self_attn.linear_out": "output",
    "encoder.layers.{i}.self_attn.linear_pos": "position",
    "encoder.layers.{i}.self_attn.pos_bias_u": "position",
    "encoder.layers.{i}.self_attn.pos_bias_v": "position",
    "encoder.layers.{i}.self_attn_layer_norm": "norm",
    "encoder.layers.{i}.conv_module.layer_norm": "norm",
    "encoder.layers.{i}.conv_module.batch_norm": "norm",
    "encoder.layers.{i}.conv_module.pointwise_conv1": "conv",
    "encoder.layers.{i}.conv_module.depthwise_conv": "conv",
    "encoder.layers.{i}.conv_module.pointwise_conv2": "conv",
    "encoder.layers.{i}.ffn1_layer_norm": "norm",
    "encoder.layers.{i}.ffn2_layer_norm": "norm",
    **under("encoder.layers.{i}.ffn1", SOUND_FEED_FORWARD),
    **under("encoder.layers.{i}.ffn2", SOUND_FEED_FORWARD),
}
register("wav2vec2-conformer", Description(WAV2VEC2_CONFORMER, config_heads))
