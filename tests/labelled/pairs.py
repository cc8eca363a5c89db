"""Models of two stacks, labelled by their forward passes.

The comment before a truth names the lines of `modeling_….py` in transformers 5.22 that prove it.
"""

from labelled.encoders import GLOBAL
from labelled.truth import Entry, Labelled, Table, crossed, shares, typed, under
from zoo import SIZES, SPECIAL, TWO_SIDED, VISION, image_and_text, pair

STACKS = {"encoder": "encoder", "decoder": "decoder"}
ATTENTION: Table = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "output",
}
FEED_FORWARD: Table = {"fc1": "up", "fc2": "down", "final_layer_norm": "norm"}
ENCODER_LAYER: Table = {
    **under("self_attn", ATTENTION),
    "self_attn_layer_norm": "norm",
    **FEED_FORWARD,
}
DECODER_LAYER: Table = {
    **ENCODER_LAYER,
    **under("encoder_attn", crossed(ATTENTION)),
    "encoder_attn_layer_norm": "norm",
}


def both(*paths: tuple[str, str], encoder_layer: Table = ENCODER_LAYER) -> dict[str, Entry]:
    """Return the table of BART's relatives; the paths are in either stack."""
    table: dict[str, Entry] = {"shared": "embedding"}
    for stack in STACKS:
        table |= {f"{stack}.{path}": role for path, role in paths}
    table |= under("encoder.layers.{i}", encoder_layer)
    return table | under("decoder.layers.{i}", DECODER_LAYER)


POSITION, LAST, FIRST = (
    ("embed_positions", "position"),
    ("layer_norm", "norm"),
    ("layernorm_embedding", "norm"),
)
LED_ATTENTION: Table = {"query": "query", "key": "key", "value": "value", **GLOBAL}
LED_ENCODER: Table = {
    **under("self_attn.longformer_self_attn", LED_ATTENTION),
    "self_attn.output": "output",
    "self_attn_layer_norm": "norm",
    **FEED_FORWARD,
}
PROPHETNET_ATTENTION: Table = {
    "query_proj": "query",
    "key_proj": "key",
    "value_proj": "value",
    "out_proj": "output",
}
PROPHETNET_LAYER: Table = {
    **under("self_attn", PROPHETNET_ATTENTION),
    "self_attn_layer_norm": "norm",
    "feed_forward.intermediate": "up",
    "feed_forward.output": "down",
    "feed_forward_layer_norm": "norm",
}
PROPHETNET: dict[str, Entry] = {
    "word_embeddings": "embedding",
    "encoder.position_embeddings": "position",
    "encoder.embeddings_layer_norm": "norm",
    **under("encoder.layers.{i}", PROPHETNET_LAYER),
    "decoder.position_embeddings": "position",
    "decoder.ngram_embeddings": "embedding",  # the token of a stream that predicts
    "decoder.embeddings_layer_norm": "norm",
    **under("decoder.layers.{i}", PROPHETNET_LAYER),
    # scores of relative positions, computed from the hidden states
    "decoder.layers.{i}.self_attn.relative_pos_embeddings": "position",
    **under("decoder.layers.{i}.cross_attn", crossed(PROPHETNET_ATTENTION)),
    "decoder.layers.{i}.cross_attn_layer_norm": "norm",
}
SIGLIP_LAYER: Table = {
    **under("self_attn", ATTENTION),
    "layer_norm1": "norm",
    "layer_norm2": "norm",
    "mlp.fc1": "up",
    "mlp.fc2": "down",
}
# The head of the images is itself an attention, whose one query comes from a learned token. What
# it consists of is true of it, and so is that it is a head.
POOLING: Table = {
    "probe": "embedding|head|other",
    "attention.in_proj_weight": shares(
        ("cross.query|head", 32), ("cross.key|head", 32), ("cross.value|head", 32)
    ),
    "attention.in_proj_bias": shares(
        ("cross.query|head", 32), ("cross.key|head", 32), ("cross.value|head", 32)
    ),
    "attention.out_proj": "cross.output|head",
    "layernorm": "norm|head",
    "mlp.fc1": "up|head",
    "mlp.fc2": "down|head",
}
SIGLIP: dict[str, Entry] = {
    "logit_scale": "other",
    "logit_bias": "other",
    "text_model.embeddings.token_embedding": "embedding",
    "text_model.embeddings.position_embedding": "position",
    **under("text_model.encoder.layers.{i}", SIGLIP_LAYER),
    "text_model.final_layer_norm": "norm",
    "text_model.head": "head",
    "vision_model.embeddings.patch_embedding": "embedding",
    "vision_model.embeddings.position_embedding": "position",
    **under("vision_model.encoder.layers.{i}", SIGLIP_LAYER),
    "vision_model.post_layernorm": "norm",
    **under("vision_model.head", POOLING),
}
LONG = TWO_SIDED | {"max_position_embeddings": 64}

PAIRS: dict[str, Labelled] = {
    # modeling_mbart.py 215, 235-236 (cross: the encoder's states), 263, 311-313, 557, 581
    "mbart": typed("mbart", LONG, both(POSITION, FIRST, LAST), pair, stacks=STACKS),
    # modeling_pegasus.py 202, 222-223, 250, 299-301, 512 and 673 (sinusoids, never trained)
    "pegasus": typed("pegasus", LONG, both(POSITION, LAST), pair, stacks=STACKS),
    # modeling_m2m_100.py 279, 299-300, 327, 376-378; 561: sinusoids in a buffer
    "m2m_100": typed("m2m_100", LONG, both(LAST), pair, stacks=STACKS),
    # modeling_led.py 148-150, 606-608 (global), 710; decoder: 763, 783-784, 846
    "led": typed(
        "led",
        TWO_SIDED
        | {
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
            "attention_window": 4,
        },
        both(POSITION, FIRST, encoder_layer=LED_ENCODER),
        pair,
        stacks=STACKS,
    ),
    # modeling_prophetnet.py 430, 450-451, 465-497; decoder: 581-583, then two kinds of streams that
    # share the projections: 628-654 and 676-714; 749 and 799 (relative positions), 1162-1178
    "prophetnet": typed(
        "prophetnet",
        {
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "vocab_size": 99,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 1,
        }
        | SPECIAL,
        PROPHETNET,
        pair,
        stacks=STACKS,
    ),
    # modeling_siglip.py 284-286, 540 (text head), 628-643 (attention pooling), 804-805
    "siglip": typed(
        "siglip",
        {"text_config": SIZES | SPECIAL | {"projection_size": 32}, "vision_config": VISION},
        SIGLIP,
        image_and_text,
        stacks={"text_model": "text", "vision_model": "vision"},
    ),
}
