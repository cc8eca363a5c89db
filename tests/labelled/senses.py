"""Encoders of images and sound, labelled by their forward passes.

The comment before a truth names the lines of `modeling_….py` in transformers 5.22 that prove it.
"""

import torch

from labelled.truth import Entry, Labelled, Table, Whole, shares, typed, under
from zoo import SOUND, VISION, Inputs, image, sound

ATTENTION: Table = {
    "attention.q_proj": "query",
    "attention.k_proj": "key",
    "attention.v_proj": "value",
    "attention.o_proj": "output",
}
FEED_FORWARD: Table = {"mlp.fc1": "up", "mlp.fc2": "down"}
NORMS: Table = {"layernorm_before": "norm", "layernorm_after": "norm"}
LAYER: Table = {**ATTENTION, **FEED_FORWARD, **NORMS}
PATCHES: Table = {
    "embeddings.cls_token": "embedding",
    "embeddings.patch_embeddings.projection": "embedding",
}
DISTILLED: dict[str, Entry] = {
    **PATCHES,
    "embeddings.distillation_token": "embedding",
    "embeddings.position_embeddings": "position",
    **under("layers.{i}", LAYER),
    "layernorm": "norm",
}
DINOV2: dict[str, Entry] = {
    **PATCHES,
    "embeddings.mask_token": "embedding|other",  # used if a mask is given
    "embeddings.position_embeddings": "position",
    **under("encoder.layer.{i}", {**ATTENTION, **FEED_FORWARD, "norm1": "norm", "norm2": "norm"}),
    "encoder.layer.{i}.layer_scale1": "other",
    "encoder.layer.{i}.layer_scale2": "other",
    "layernorm": "norm",
}
BEIT: dict[str, Entry] = {
    **PATCHES,
    "embeddings.mask_token": "embedding|other",
    **under("layers.{i}", LAYER),
    "layers.{i}.lambda_1": "other",
    "layers.{i}.lambda_2": "other",
    "layers.{i}.relative_position_bias.relative_position_bias_table": "position",
    "pooler.layernorm": "head|norm",  # the pooler has nothing else
}


def heads_of(table: Table, heads: int) -> dict[str, Entry]:
    """Return a table whose attention has this number of heads."""
    inputs = ("query", "key", "value")
    return {path: Whole(r, heads) if r in inputs else r for path, r in table.items()}  # type: ignore[arg-type]


SWIN_LAYER: Table = {
    **LAYER,
    "attention.relative_position_bias.relative_position_bias_table": "position",
}
SWIN: dict[str, Entry] = {
    "embeddings.patch_embeddings.projection": "embedding",
    "embeddings.norm": "norm",
    **under("encoder.layers.{0}.blocks.{i}", heads_of(SWIN_LAYER, 2)),
    **under("encoder.layers.{1}.blocks.{i}", heads_of(SWIN_LAYER, 4)),
    "encoder.layers.*.downsample.reduction": "other|embedding",  # merges patches
    "encoder.layers.*.downsample.norm": "norm",
    "layernorm": "norm",
}
SEGFORMER_LAYER: Table = {**LAYER, "mlp.dwconv.dwconv": "conv"}
SEGFORMER: dict[str, Entry] = {
    "stages.0.patch_embeddings.proj": "embedding|conv",
    "stages.1.patch_embeddings.proj": "embedding|conv",  # merges patches
    "stages.*.patch_embeddings.layer_norm": "norm",
    **under("stages.{0}.blocks.{i}", heads_of(SEGFORMER_LAYER, 2)),
    # a convolution that keys and values are computed from
    "stages.{0}.blocks.{i}.attention.sequence_reduction.sequence_reduction": "conv|latent",
    "stages.{0}.blocks.{i}.attention.sequence_reduction.layer_norm": "norm",
    **under("stages.{1}.blocks.{i}", heads_of(SEGFORMER_LAYER, 4)),
    "stages.*.layer_norm": "norm",
}
HUBERT: dict[str, Entry] = {
    "masked_spec_embed": "embedding|other",  # used if a mask is given
    "feature_extractor.conv_layers.*.conv": "conv",
    "feature_extractor.conv_layers.*.layer_norm": "norm",
    "feature_projection.layer_norm": "norm",
    "feature_projection.projection": "embedding",
    "encoder.pos_conv_embed.**": "position",
    "encoder.layer_norm": "norm",
    "encoder.layers.{i}.attention.q_proj": "query",
    "encoder.layers.{i}.attention.k_proj": "key",
    "encoder.layers.{i}.attention.v_proj": "value",
    "encoder.layers.{i}.attention.out_proj": "output",
    "encoder.layers.{i}.layer_norm": "norm",
    "encoder.layers.{i}.feed_forward.intermediate_dense": "up",
    "encoder.layers.{i}.feed_forward.output_dense": "down",
    "encoder.layers.{i}.final_layer_norm": "norm",
}


def levit_stage(heads: int, narrowing: int) -> dict[str, Entry]:
    """Return the table of a LeViT stage, by its attention's heads and its narrowing attention's.

    A linear layer has a batch norm after it. A head has 4 rows of queries and of keys, and 8 rows
    of values, in the attention that narrows 16.
    """
    table: dict[str, Entry] = {
        "module.attention_biases": "position",
        "module.queries_keys_values.linear": shares(
            ("query", 4, heads), ("key", 4, heads), ("value", 8, heads), repeats=heads
        ),
        "module.queries_keys_values.batch_norm": "norm",
        "module.projection.linear": "output",
        "module.projection.batch_norm": "norm",
        "module.linear_up.linear": "up",
        "module.linear_up.batch_norm": "norm",
        "module.linear_down.linear": "down",
        "module.linear_down.batch_norm": "norm",
    }
    if narrowing:
        table |= {
            "attention_biases": "position",
            "keys_values.linear": shares(
                ("key", 4, narrowing), ("value", 16, narrowing), repeats=narrowing
            ),
            "keys_values.batch_norm": "norm",
            "queries.linear": Whole("query", narrowing),
            "queries.batch_norm": "norm",
            "projection.linear": "output",
            "projection.batch_norm": "norm",
        }
    return table


LEVIT: dict[str, Entry] = {
    "patch_embeddings.*.convolution": "embedding|conv",
    "patch_embeddings.*.batch_norm": "norm",
    **under("encoder.stages.{0}.layers.{i}", levit_stage(2, 4)),
    **under("encoder.stages.{1}.layers.{i}", levit_stage(2, 6)),
    **under("encoder.stages.{2}.layers.{i}", levit_stage(4, 0)),
}


def large_image() -> Inputs:
    return {"pixel_values": torch.randn(2, 3, 128, 128)}


def mel_bins() -> Inputs:
    return {"input_values": torch.randn(2, 32, 16)}


SENSES: dict[str, Labelled] = {
    # modeling_dinov2.py 203-205, 223, 247-249, 317 and 324 (layer scales), 135-138 (mask token)
    "dinov2": typed("dinov2", VISION | {"mlp_ratio": 2}, DINOV2, image),
    # modeling_deit.py 221-223, 241, 151-163, 279-286, 397
    "deit": typed("deit", VISION, {**DISTILLED, "pooler.dense": "head"}, image),
    # modeling_beit.py 319-321 (keys have no bias), 339, 414-421 (positions), 163-166
    "beit": typed(
        "beit", VISION | {"use_relative_position_bias": True, "use_mask_token": True}, BEIT, image
    ),
    # modeling_swin.py 428-448 (positions added to the mask), 466, 323-324 (patches merged)
    "swin": typed(
        "swin",
        {
            "embed_dim": 16,
            "depths": [1, 2],
            "num_heads": [2, 4],
            "window_size": 2,
            "image_size": 16,
            "patch_size": 2,
            "mlp_ratio": 2.0,
        },
        SWIN,
        image,
        depths=(1, 2),
    ),
    # modeling_segformer.py 175-183, 105-107 (reduction), 201, 238-242, 83, 346
    "segformer": typed(
        "segformer",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 2],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "num_attention_heads": [2, 4],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "mlp_ratios": [2, 2],
        },
        SEGFORMER,
        image,
        depths=(1, 2),
    ),
    # modeling_levit.py 198-209 (split by head: 4, 4, 8), 276-293 (queries of fewer places), 131-133
    "levit": typed(
        "levit",
        {
            "image_size": 128,
            "hidden_sizes": [16, 24, 32],
            "num_attention_heads": [2, 2, 4],
            "depths": [1, 1, 1],
            "key_dim": [4, 4, 4],
            "attention_ratio": [2, 2, 2],
        },
        LEVIT,
        large_image,
        depths=(4, 4, 2),
    ),
    # modeling_audio_spectrogram_transformer.py 154-156, 174, 93-96, 188-190, 212-219
    "audio-spectrogram-transformer": typed(
        "audio-spectrogram-transformer",
        {name: value for name, value in VISION.items() if name != "image_size"}
        | {"num_mel_bins": 16, "max_length": 32, "frequency_stride": 4, "time_stride": 4},
        DISTILLED,
        mel_bins,
    ),
    # modeling_hubert.py 321-326, 345, 365-369, 435 (positions by a convolution), 232, 797
    "hubert": typed("hubert", SOUND, HUBERT, sound),
}
