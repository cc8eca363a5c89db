"""Vision models of timm 1.0.31, labelled by their forward passes.

They are small, but have the structure of the model they are named after. The comment before a
truth names the functions, or the lines, of `timm/models/….py` that prove it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from labelled.truth import Entry, Labelled, Shares, Table, Whole, made, shares, under
from outside import outside
from zoo import Inputs

ATTENTION = ("query", "key", "value")
CLASSES = 7
PATCHES = "embedding|conv"  # a convolution whose kernel is as large as its stride, or nearly so
STEM = "conv|embedding"  # one of several convolutions that an image goes through first
POINTWISE = "conv|up|down|gate|other"  # a 1×1 convolution between others
MERGED = "other|embedding"  # four neighbouring patches become one
POOLED = "norm|head"  # after the tokens are averaged
BIAS = {"attn.q_bias": Whole("query", kind="bias"), "attn.v_bias": Whole("value", kind="bias")}
NORMS: Table = {"norm1": "norm", "norm2": "norm"}
FEED_FORWARD: Table = {"mlp.fc1": "up", "mlp.fc2": "down"}
CPB: Table = {"attn.cpb_mlp.0": "position", "attn.cpb_mlp.2": "position"}  # of relative positions


def fused(width: int, heads: int | None = None) -> Shares:
    """Return the entry of a weight with all queries, then all keys, then all values."""
    each = [(role, width) if heads is None else (role, width, heads) for role in ATTENTION]
    return shares(*each)


def timm(name: str, **small: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a model of timm with other sizes."""
    return made(lambda: outside("timm").create_model(name, num_classes=CLASSES, **small))


def image(size: int) -> Callable[[], Inputs]:
    """Return a function that makes two square images."""
    return lambda: {"x": torch.randn(2, 3, size, size)}


def block(width: int, heads: int | None = None) -> dict[str, Entry]:
    """Return the table of timm's usual layer."""
    return {
        **NORMS,
        "attn.qkv": fused(width, heads),
        "attn.proj": "output",
        **FEED_FORWARD,
    }


def vit(width: int, scaled: bool = False) -> dict[str, Entry]:
    """Return the table of timm's vision transformer, with or without layer scale."""
    layer = block(width) | ({"ls1": "other", "ls2": "other"} if scaled else {})
    return {
        "cls_token": "embedding",
        "pos_embed": "position",
        "patch_embed.proj": PATCHES,
        **under("blocks.{i}", layer),
        "norm": "norm",
        "head": "head",
    }


def plain(name: str, heads: int, table: Table | None = None, patch: int = 16) -> Labelled:
    """Return the truth about a model of one stack of equal layers, two here."""
    width = 8 * heads
    build = timm(name, img_size=2 * patch, embed_dim=width, depth=2)
    return Labelled(
        build, image(2 * patch), vit(width) if table is None else table, heads=(heads, heads)
    )


def beit(width: int) -> dict[str, Entry]:
    """Return the table of BEiT: relative positions, no bias of keys, layer scale."""
    layer = {
        **block(width),
        **BIAS,
        "attn.relative_position_bias_table": "position",
        "gamma_1": "other",
        "gamma_2": "other",
    }
    return {
        "cls_token": "embedding",
        "patch_embed.proj": PATCHES,
        **under("blocks.{i}", layer),
        "fc_norm": POOLED,
        "head": "head",
    }


def eva(width: int, hidden: int) -> dict[str, Entry]:
    """Return the table of EVA-02: rotary and learned positions, a gated feed-forward network."""
    layer = {
        **block(width),
        **BIAS,
        "mlp.fc1": shares(("gate", hidden), ("up", hidden)),  # act(first half) * second half
    }
    table = {**vit(width), **under("blocks.{i}", layer), "fc_norm": POOLED}
    return {path: entry for path, entry in table.items() if path != "norm"}


def swin(widths: Iterable[int], heads: Iterable[int], second: bool = False) -> dict[str, Entry]:
    """Return the table of timm's Swin, or of its second version: cosine attention."""
    version: Table = {"attn.relative_position_bias_table": "position"}
    if second:
        version = {**BIAS, **CPB, "attn.logit_scale": "other"}
    table: dict[str, Entry] = {
        "patch_embed.proj": PATCHES,
        "patch_embed.norm": "norm",
        "layers.*.downsample.reduction": MERGED,
        "layers.*.downsample.norm": "norm",
        "norm": "norm",
        "head.fc": "head",
    }
    for stage, (width, count) in enumerate(zip(widths, heads, strict=True)):
        layer = of_heads({**block(width, count), **version}, count)
        table |= under(f"layers.{{{stage}}}.blocks.{{i}}", layer)
    return table


def of_heads(table: Table, heads: int) -> dict[str, Entry]:
    """Return a table whose separate queries, keys and values have this number of heads."""
    return {
        path: replace(entry, heads=heads) if isinstance(entry, Whole) else entry
        for path, entry in table.items()
    }


def apart(heads: int | None = None) -> dict[str, Entry]:
    """Return queries, keys and values as modules of their own."""
    return {f"attn.{role[0]}": Whole(role, heads) for role in ATTENTION}


CLASS_LAYER: dict[str, Entry] = {  # the class token asks all tokens
    **NORMS,
    **apart(),
    "attn.proj": "output",
    **FEED_FORWARD,
}


def cait(width: int) -> dict[str, Entry]:
    """Return the table of CaiT: layers with talking heads, then layers of the class token."""
    scales: Table = {"gamma_1": "other", "gamma_2": "other"}
    mixes: Table = {"attn.proj_l": "other", "attn.proj_w": "other"}  # heads × heads
    return {
        **vit(width),
        **under("blocks.{i}", {**block(width), **scales, **mixes}),
        **under("blocks_token_only.{i}", {**CLASS_LAYER, **scales}),
    }


def xcit(width: int) -> dict[str, Entry]:
    """Return the table of XCiT: channels attend to channels, then layers of the class token."""
    layer = {
        **block(width),
        "attn.temperature": "other",
        "norm3": "norm",
        "local_mp.conv1": "conv",
        "local_mp.bn": "norm",
        "local_mp.conv2": "conv",
        "gamma1": "other",
        "gamma2": "other",
        "gamma3": "other",
    }
    return {
        "cls_token": "embedding",
        "patch_embed.proj.*.0": PATCHES,
        "patch_embed.proj.*.1": "norm",
        "pos_embed.token_projection": "position",  # of sines and cosines
        **under("blocks.{i}", layer),
        **under("cls_attn_blocks.{i}", {**CLASS_LAYER, "gamma1": "other", "gamma2": "other"}),
        "norm": "norm",
        "head": "head",
    }


def reduced(width: int, heads: int, ratio: int) -> dict[str, Entry]:
    """Return the table of an attention whose keys and values are of fewer places."""
    table: dict[str, Entry] = {
        "attn.q": Whole("query", heads),
        "attn.kv": shares(("key", width, heads), ("value", width, heads)),
        "attn.proj": "output",
    }
    if ratio > 1:
        table |= {"attn.sr": "conv|other", "attn.norm": "norm"}
    return table


def pvt(stages: Iterable[tuple[int, int, int]]) -> dict[str, Entry]:
    """Return the table of PVT v2, by the width, heads and reduction of its stages."""
    table: dict[str, Entry] = {
        "patch_embed.proj": PATCHES,
        "patch_embed.norm": "norm",
        "stages.*.downsample.proj": PATCHES,
        "stages.*.downsample.norm": "norm",
        "stages.*.norm": "norm",
        "head": "head",
    }
    for stage, (width, heads, ratio) in enumerate(stages):
        layer = {**NORMS, **FEED_FORWARD, "mlp.dwconv": "conv", **reduced(width, heads, ratio)}
        table |= under(f"stages.{{{stage}}}.blocks.{{i}}", layer)
    return table


def twins(stages: Iterable[tuple[int, int, int]]) -> dict[str, Entry]:
    """Return the table of Twins-SVT: in turns, attention in windows and to fewer places."""
    table: dict[str, Entry] = {
        "patch_embeds.*.proj": PATCHES,
        "patch_embeds.*.norm": "norm",
        "pos_block.*.proj.0": "position|conv",  # positions by a convolution, added
        "norm": "norm",
        "head": "head",
    }
    for stage, (width, heads, ratio) in enumerate(stages):
        table |= under(f"blocks.{{{stage}}}.{{0}}", block(width, heads))
        layer = {**NORMS, **FEED_FORWARD, **reduced(width, heads, ratio)}
        table |= under(f"blocks.{{{stage}}}.{{1}}", layer)
    return table


MOBILE_WIDTH = 32
MOBILE: dict[str, Entry] = {
    "stem.conv": STEM,
    "stem.bn": "norm",
    "stages.*.*.conv1_1x1.conv": POINTWISE,
    "stages.*.*.conv1_1x1.bn": "norm",
    "stages.*.*.conv2_kxk.conv": "conv",
    "stages.*.*.conv2_kxk.bn": "norm",
    "stages.*.*.conv3_1x1.conv": POINTWISE,
    "stages.*.*.conv3_1x1.bn": "norm",
    "stages.*.1.conv_kxk.conv": "conv",
    "stages.*.1.conv_kxk.bn": "norm",
    "stages.*.1.conv_1x1": "conv|embedding|other",  # makes tokens
    **under("stages.{i}.1.transformer.{i}", block(MOBILE_WIDTH)),
    "stages.*.1.norm": "norm",
    "stages.*.1.conv_proj.conv": "conv|other",  # from tokens
    "stages.*.1.conv_proj.bn": "norm",
    "stages.*.1.conv_fusion.conv": "conv",
    "stages.*.1.conv_fusion.bn": "norm",
    "final_conv.conv": "conv|head|other",
    "final_conv.bn": "norm",
    "head.fc": "head",
}


def mobilevit() -> nn.Module:
    """Build MobileViT with narrower blocks and two transformer layers in each of three stages."""
    timm = outside("timm")

    def smaller(of: Any) -> Any:
        if isinstance(of, tuple):
            return tuple(smaller(each) for each in of)
        inner = dict(of.block_kwargs or {})
        if of.type == "mobilevit":
            inner |= {"transformer_dim": MOBILE_WIDTH, "transformer_depth": 2}
        return replace(of, d=min(of.d, 2), c=of.c // 4, block_kwargs=inner)

    blocks = smaller(timm.models.mobilevit.model_cfgs["mobilevit_s"].blocks)
    return timm.create_model(
        "mobilevit_s", blocks=blocks, stem_chs=8, num_features=64, num_classes=CLASSES
    )


def maxvit(stages: Iterable[tuple[int, int]]) -> dict[str, Entry]:
    """Return the table of timm's MaxViT, by the width and heads of its stages."""
    table: dict[str, Entry] = {
        "stem.conv1": STEM,
        "stem.norm1": "norm",
        "stem.conv2": STEM,
        "stages.{i}.blocks.{i}.conv.shortcut.expand": POINTWISE,  # where the width changes
        "head.norm": POOLED,
        "head.pre_logits.fc": "head",
        "head.fc": "head",
    }
    convolutions: Table = {
        "pre_norm": "norm",
        "conv1_1x1": POINTWISE,
        "norm1": "norm",
        "conv2_kxk": "conv",
        "norm2": "norm",
        "se.fc1": POINTWISE,
        "se.fc2": POINTWISE,
        "conv3_1x1": POINTWISE,
    }
    for stage, (width, heads) in enumerate(stages):
        attention = {
            **block(width, heads),
            "attn.rel_pos.relative_position_bias_table": "position",
        }
        layer = {
            **under("conv", convolutions),
            **under("attn_block", attention),
            **under("attn_grid", attention),
        }
        table |= under(f"stages.{{{stage}}}.blocks.{{i}}", layer)
    return table


def convit(width: int) -> dict[str, Entry]:
    """Return the table of ConViT: two layers with positions beside the scores, and a usual one."""
    gated: dict[str, Entry] = {
        **NORMS,
        "attn.qk": shares(("query", width), ("key", width)),
        "attn.v": "value",
        "attn.proj": "output",
        "attn.pos_proj": "position",
        "attn.gating_param": "other|gate|position",  # how much of each
        **FEED_FORWARD,
    }
    table = vit(width)
    usual = under("blocks.{i}", block(width))
    return {
        **{path: entry for path, entry in table.items() if path not in usual},
        **under("blocks.{0}", gated),
        **under("blocks.{1}", gated),
        **under("blocks.{2}", block(width)),
    }


def crossvit(widths: tuple[int, int]) -> dict[str, Entry]:
    """Return the table of CrossViT: two branches, each of which asks the other at a block's end.

    The class token of a branch asks itself and the tokens of the other branch: one may call that
    cross-attention, as its authors do, or not. A layer here is a block of both branches.
    """
    fusion: Table = {
        "norm1": "norm",
        **{f"attn.w{role[0]}": f"cross?.{role}" for role in ATTENTION},
        "attn.proj": "cross?.output",
    }
    table: dict[str, Entry] = {
        "patch_embed.*.proj": PATCHES,
        "blocks.{i}.projs.*.0": "norm",
        "blocks.{i}.projs.*.2": "other",  # the class token, for the other branch
        **under("blocks.{i}.fusion.*", fusion),
        "blocks.{i}.revert_projs.*.0": "norm",
        "blocks.{i}.revert_projs.*.2": "other",  # and back
        "norm.*": "norm",
        "head.*": "head",
    }
    for branch, width in enumerate(widths):
        table |= {f"pos_embed_{branch}": "position", f"cls_token_{branch}": "embedding"}
        table |= under(f"blocks.{{i}}.blocks.{branch}.*", block(width))
    return table


SWIN_SIZES = {"embed_dim": 24, "depths": (2, 2), "num_heads": (3, 6)}  # windows as they are
TALKING = "the scores of a head are mixed with those of others, before and after the softmax"
GATED = "what a head attends to is a mean of two softmaxes, one of which is of positions alone"

TIMM: dict[str, Labelled] = {
    # vision_transformer.py 244-253, 1088-1125, 1339-1342; layers/attention.py: Attention.forward;
    # layers/mlp.py: Mlp.forward
    "vit_tiny_patch16_224": plain("vit_tiny_patch16_224", 3),
    "vit_small_patch16_224": plain("vit_small_patch16_224", 6),
    "vit_base_patch16_224": plain("vit_base_patch16_224", 12),
    "vit_small_patch14_dinov2": plain("vit_small_patch14_dinov2", 6, vit(48, scaled=True), 14),
    # deit.py: VisionTransformerDistilled, _pos_embed and forward_head (a second token and head)
    "deit_tiny_patch16_224": plain("deit_tiny_patch16_224", 3),
    "deit_small_distilled_patch16_224": plain(
        "deit_small_distilled_patch16_224",
        6,
        {**vit(48), "dist_token": "embedding", "head_dist": "head"},
    ),
    "deit3_small_patch16_224": plain("deit3_small_patch16_224", 6, vit(48, scaled=True)),
    # beit.py: Attention.forward (the bias of keys is a buffer of zeros), Block.forward
    "beit_base_patch16_224": plain("beit_base_patch16_224", 12, beit(96)),
    "beitv2_base_patch16_224": plain("beitv2_base_patch16_224", 12, beit(96)),
    # eva.py: EvaAttention.forward, EvaBlock.forward; layers/mlp.py: GluMlp.forward
    "eva02_tiny_patch14_224": plain("eva02_tiny_patch14_224", 3, eva(24, 64), 14),
    # swin_transformer.py: WindowAttention.forward, PatchMerging.forward
    "swin_tiny_patch4_window7_224": Labelled(
        timm("swin_tiny_patch4_window7_224", img_size=56, **SWIN_SIZES),
        image(56),
        swin((24, 48), (3, 6)),
        depths=(2, 2),
    ),
    # swin_transformer_v2.py: WindowAttention.forward (cosines, cpb_mlp), norms after the branches
    "swinv2_tiny_window8_256": Labelled(
        timm("swinv2_tiny_window8_256", img_size=64, **SWIN_SIZES),
        image(64),
        swin((24, 48), (3, 6), second=True),
        depths=(2, 2),
    ),
    # cait.py: TalkingHeadAttn.forward, ClassAttn.forward, forward_cls
    "cait_xxs24_224": Labelled(
        timm("cait_xxs24_224", img_size=32, embed_dim=32, depth=2),
        image(32),
        cait(32),
        stacks={"blocks": "blocks", "blocks_token_only": "blocks_token_only"},
        may_refuse=TALKING,
    ),
    # xcit.py: XCA.forward (softmax over the channels of a head), XCABlock.forward, forward_cls
    "xcit_nano_12_p16_224": Labelled(
        timm("xcit_nano_12_p16_224", img_size=32, embed_dim=32, depth=2),
        image(32),
        xcit(32),
        stacks={"blocks": "blocks", "cls_attn_blocks": "cls_attn_blocks"},
    ),
    # pvt_v2.py: Attention.forward, MlpWithDepthwiseConv.forward, OverlapPatchEmbed.forward
    "pvt_v2_b0": Labelled(
        timm(
            "pvt_v2_b0",
            depths=(2, 2),
            embed_dims=(16, 32),
            num_heads=(1, 2),
            sr_ratios=(2, 1),
            mlp_ratios=(8, 4),
        ),
        image(32),
        pvt(((16, 1, 2), (32, 2, 1))),
        depths=(2, 2),
    ),
    # twins.py: LocallyGroupedAttn.forward, GlobalSubSampleAttn.forward, PosConv.forward
    "twins_svt_small": Labelled(
        timm(
            "twins_svt_small",
            img_size=32,
            depths=(2, 2),
            embed_dims=(16, 32),
            num_heads=(2, 4),
            sr_ratios=(2, 1),
            mlp_ratios=(4, 4),
            wss=(4, 4),
        ),
        image(32),
        twins(((16, 2, 2), (32, 4, 1))),
        depths=(2, 2),
    ),
    # mobilevit.py: MobileVitBlock.forward; byobnet.py: BottleneckBlock.forward
    "mobilevit_s": Labelled(made(mobilevit), image(128), MOBILE, depths=(0, 0, 2, 2, 2)),
    # maxxvit.py: AttentionCl.forward (heads after roles), MbConvBlock.forward,
    # MaxxVitBlock.forward; layers/classifier.py: NormMlpClassifierHead.forward
    "maxvit_tiny_tf_224": Labelled(
        timm(
            "maxvit_tiny_tf_224",
            img_size=64,
            embed_dim=(16, 32),
            depths=(2, 1),
            block_type=("M", "M"),
            stem_width=16,
            head_hidden_size=32,
            transformer_dim_head=8,
        ),
        image(64),
        maxvit(((16, 2), (32, 4))),
        depths=(2, 1),
    ),
    # convit.py: GPSA.get_attention, MHSA.forward; the class token joins before the last layer
    "convit_tiny": Labelled(
        timm("convit_tiny", img_size=32, embed_dim=8, depth=3, local_up_to_layer=2),
        image(32),
        convit(32),
        may_refuse=GATED,
    ),
    # crossvit.py: CrossAttention.forward, MultiScaleBlock.forward, _embed, forward_head
    "crossvit_9_240": Labelled(
        timm(
            "crossvit_9_240",
            img_size=48,
            img_scale=(1.0, 2 / 3),
            embed_dim=(32, 48),
            depth=((1, 2, 0), (1, 2, 0)),
        ),
        image(48),
        crossvit((32, 48)),
        uncounted="two branches of different depths run side by side",
    ),
}
