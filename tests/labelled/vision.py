"""Vision models of timm and of torchvision 0.28, labelled by their forward passes.

The comment before a truth names the functions of `torchvision/models/….py` that prove it.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from labelled.timm_models import (
    CLASSES,
    CPB,
    MERGED,
    NORMS,
    PATCHES,
    POINTWISE,
    POOLED,
    STEM,
    TIMM,
    fused,
    image,
)
from labelled.truth import Entry, Labelled, Table, made, shares, under
from outside import outside


def torchvision(name: str, build: Callable[[Any], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that builds a model from a file of torchvision."""
    return made(lambda: build(outside(f"torchvision.models.{name}")))


TORCHVISION_VIT: dict[str, Entry] = {
    "class_token": "embedding",
    "conv_proj": PATCHES,
    "encoder.pos_embedding": "position",
    "encoder.layers.encoder_layer_{i}.ln_1": "norm",
    "encoder.layers.encoder_layer_{i}.self_attention": fused(32),
    "encoder.layers.encoder_layer_{i}.self_attention.out_proj": "output",
    "encoder.layers.encoder_layer_{i}.ln_2": "norm",
    "encoder.layers.encoder_layer_{i}.mlp.0": "up",
    "encoder.layers.encoder_layer_{i}.mlp.3": "down",
    "encoder.ln": "norm",
    "heads.head": "head",
}


def torchvision_swin(stages: Iterable[tuple[int, int]], second: bool = False) -> dict[str, Entry]:
    """Return the table of torchvision's Swin: stages are every other module of `features`.

    In the second version the rows of the bias that belong to keys are set to zero in the pass.
    """
    table: dict[str, Entry] = {
        "features.0.0": PATCHES,
        "features.0.2": "norm",
        "features.2.reduction": MERGED,
        "features.2.norm": "norm",
        "norm": "norm",
        "head": "head",
    }
    for stage, (width, heads) in enumerate(stages):
        layer: dict[str, Entry] = {
            **NORMS,
            "attn.qkv": fused(width, heads),
            "attn.proj": "output",
            "mlp.0": "up",
            "mlp.3": "down",
        }
        if second:
            del layer["attn.qkv"]
            unused = shares(
                ("query", width, heads), ("key|other", width, heads), ("value", width, heads)
            )
            layer |= {
                "attn.qkv.weight": fused(width, heads),
                "attn.qkv.bias": unused,
                "attn.logit_scale": "other",
                **CPB,
            }
        else:
            layer["attn.relative_position_bias_table"] = "position"
        table |= under(f"features.{{{2 * stage + 1}}}.{{i}}", layer)
    return table


def torchvision_maxvit(stages: Iterable[tuple[int, int]]) -> dict[str, Entry]:
    """Return the table of torchvision's MaxViT, by the width and heads of its stages."""
    table: dict[str, Entry] = {
        "stem.0.0": STEM,
        "stem.0.1": "norm",
        "stem.1.0": STEM,
        "classifier.2": POOLED,
        "classifier.3": "head",
        "classifier.5": "head",
    }
    convolutions: Table = {
        "proj.1": POINTWISE,
        "layers.pre_norm": "norm",
        "layers.conv_a.0": POINTWISE,
        "layers.conv_a.1": "norm",
        "layers.conv_b.0": "conv",
        "layers.conv_b.1": "norm",
        "layers.squeeze_excitation.fc1": POINTWISE,
        "layers.squeeze_excitation.fc2": POINTWISE,
        "layers.conv_c": POINTWISE,
    }
    for stage, (width, heads) in enumerate(stages):
        attention: Table = {
            "attn_layer.0": "norm",
            "attn_layer.1.relative_position_bias_table": "position",
            "attn_layer.1.to_qkv": fused(width, heads),
            "attn_layer.1.merge": "output",
            "mlp_layer.0": "norm",
            "mlp_layer.1": "up",
            "mlp_layer.3": "down",
        }
        layer = {
            **under("MBconv", convolutions),
            **under("window_attention", attention),
            **under("grid_attention", attention),
        }
        table |= under(f"blocks.{{{stage}}}.layers.{{i}}.layers", layer)
    return table


TORCHVISION_SWIN = ([4, 4], 24, [2, 2], [3, 6])  # patch, width, depths, heads
TORCHVISION: dict[str, Labelled] = {
    # vision_transformer.py: EncoderBlock.forward, Encoder.forward, VisionTransformer.forward
    "vit_b_16": Labelled(
        torchvision(
            "vision_transformer",
            lambda file: file.VisionTransformer(
                32, 16, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=CLASSES
            ),
        ),
        image(32),
        TORCHVISION_VIT,
    ),
    # swin_transformer.py: shifted_window_attention, SwinTransformerBlock.forward
    "swin_t": Labelled(
        torchvision(
            "swin_transformer",
            lambda file: file.SwinTransformer(*TORCHVISION_SWIN, [7, 7], num_classes=CLASSES),
        ),
        image(56),
        torchvision_swin(((24, 3), (48, 6))),
        depths=(0, 2, 0, 2),
    ),
    # the same: ShiftedWindowAttentionV2.get_relative_position_bias, SwinTransformerBlockV2.forward
    "swin_v2_t": Labelled(
        torchvision(
            "swin_transformer",
            lambda file: file.SwinTransformer(
                *TORCHVISION_SWIN,
                [8, 8],
                num_classes=CLASSES,
                block=file.SwinTransformerBlockV2,
                downsample_layer=file.PatchMergingV2,
            ),
        ),
        image(64),
        torchvision_swin(((24, 3), (48, 6)), second=True),
        depths=(0, 2, 0, 2),
    ),
    # maxvit.py: MBConv.forward, RelativePositionalMultiHeadAttention.forward,
    # PartitionAttentionLayer.forward
    "maxvit_t": Labelled(
        torchvision(
            "maxvit",
            lambda file: file.MaxVit(
                (32, 32),
                stem_channels=16,
                partition_size=2,
                block_channels=[16, 32],
                block_layers=[2, 1],
                head_dim=8,
                stochastic_depth_prob=0.2,
                num_classes=CLASSES,
            ),
        ),
        image(32),
        torchvision_maxvit(((16, 2), (32, 4))),
        depths=(2, 1),
    ),
}
VISION: dict[str, Labelled] = {**TIMM, **TORCHVISION}
