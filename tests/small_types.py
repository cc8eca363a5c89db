"""A small model of every type in transformers' AutoModel mapping, made from its config alone."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from zoo import widen

HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_DIM, FEED_FORWARD, VOCABULARY = 32, 4, 2, 8, 64, 99
LAYERS = re.compile(
    r"(num_|n_)?((en|de)coder_|hidden_|text_|attention_|transformer_|num_|backbone_|speech_|fuser_)*"
    r"(layers?|blocks)|(\w+_)?depth|(en|de)coder_num(_hidden)?_layers|num_(en|de)coder_blocks"
    r"|(\w+_)?num_hidden_layers"
)
KEPT_LAYERS = {"num_feat_extract_layers", "num_conv_layers", "iou_head_depth", "encode_proj_layers"}
HEAD_COUNTS = re.compile(r"(\w+_)?(n_|num_)?(attention_)?heads?|(\w+_)?num_\w*heads|attn_\w*heads")
KV_HEADS = re.compile(r"\w*(key_value_heads|kv_heads|head_kv|query_groups)|num_groups_kv")
HEAD_DIMS = re.compile(r"(\w+_)?(head_dim|dim_head|d_kv|head_size|kv_channels|d_head)")
WIDTHS = re.compile(
    r"(\w+_)?(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|embedding_dim"
    r"|projection_dim|proj_dim|model_dim|emb_dim|dim|hidden_channels|output_size|embed_size"
    r"|output_dim|mapper_dim|projection_size|output_hidden_size|latent_size)"
)
FEED_FORWARDS = re.compile(
    r"(\w+_)?(intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|ff_dim|d_inner|inner_dim"
    r"|ffn_size|feedforward_dim|feed_forward_hidden_size|mlp_hidden_size|intermediate_dim"
    r"|dim_feedforward|feedforward_size|linear_units|ffn_hidden_dim)"
)
EXPERTS = re.compile(r"(num|n|moe_num)_(routed_|local_)?experts|moe_num_experts|num_local_experts")
VOCABULARIES = re.compile(r"(\w+_)?vocab_size(_\w+)?|(n_tokens|n_vocab)")
TOKENS = re.compile(r"(\w+_)?token_(id|index)|(\w+_)?(token|image|audio|video)_idx?")
FIXED: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "img_size": 32, "pretrain_image_size": 32,
    "max_position_embeddings": 64, "n_positions": 64, "max_source_positions": 16,
    "max_target_positions": 64, "num_mel_bins": 16, "max_2d_position_embeddings": 64,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k": None,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1, "type_vocab_size": 2,
    "kv_lora_rank": 16, "q_lora_rank": 24, "o_lora_rank": 16, "moe_num_shared_experts": 1,
    "num_queries": 5, "num_query_tokens": 5, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "sliding_window": 4, "attention_window": 4,
    "index_topk": 4, "index_n_heads": 4, "num_position_embeddings": 16, "rotary_dim": 4,
    "image_seq_length": 16, "mm_tokens_per_image": 4, "num_image_tokens": 16,
    "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2, "layerdrop": 0.0, "apply_spec_augment": False,
    "query_pre_attn_scalar": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_num_heads": 4, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_d_state": 8, "ssm_state_size": 8,
    "mamba_chunk_size": 4, "time_step_rank": 4, "state_size": 8, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0, "mask_time_prob": 0.0, "subsampling_conv_channels": 8,
    "num_codevectors_per_group": 4, "num_negatives": 2, "codevector_dim": 16,
    "proj_codevector_dim": 16, "first_k_dense_replace": 1, "query_dim": None,
    "frequency_embedding_size": 32, "num_frames": 2, "sep_token_id": 2, "cls_token_id": 1,
    "hidden_size_global": 32, "context_length": 32, "prediction_length": 8,
}  # fmt: skip
# Values for what a config leaves open although its model needs it.
OPEN: dict[str, Any] = {
    "image_token_id": 90, "audio_token_id": 91, "video_token_id": 92, "prediction_length": 8,
    "image_token_index": 90, "audio_token_index": 91,
}  # fmt: skip
FORCED: dict[str, Any] = OPEN | {
    "head_dim": HEAD_DIM, "num_key_value_heads": KEY_VALUE_HEADS, "num_experts_per_tok": 2,
    "n_routed_experts": 4, "vocab_size": VOCABULARY, "pad_token_id": 1, "n_shared_experts": 1,
    "sliding_window": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
    "indexer_budget": 8, "indexer_compress_ratio": 2,
}  # fmt: skip
# Types whose rotary sections are not told by the config's default but by the model.
SECTIONED = (
    "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "glm4v", "glm46v", "glmga", "glm_ocr", "glm_image",
    "paddleocr_vl",
)  # fmt: skip
RESNET: dict[str, Any] = {
    "use_timm_backbone": False,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet", "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32],
        "embedding_size": 8, "out_features": ["stage2", "stage3", "stage4"],
    },
}  # fmt: skip
COMPASS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        for kind in ("sliding_attention", "full_attention")
    },
}
# Every fourth layer has no rotary positions; the lists name all layers.
LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "moe_layers": [0, 2],
    "no_rope_layers": [1, 1, 1, 0],
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
}
MISTRAL_LARGE4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": ["indexed_attention"] * 4,
    "no_rope_layers": [1, 1, 1, 0],
    "kv_source_layers": [0, 1, 2, 3],
}
HUNYUAN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1, 1]}

# What a type needs beyond the names above; a dotted name is that of a sub-config.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "detr": RESNET, "conditional_detr": RESNET, "dab-detr": RESNET, "deformable_detr": RESNET,
    "table-transformer": RESNET,
    "chameleon": {"vocabulary_map": {"<image>": 90, "IMGIMGBBZ": 91}},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
    },
    "xmod": {"default_language": "en_XX"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "lilt": {"hidden_size": 48},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2},
    "mamba2": {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 8,
               "n_groups": 2, "chunk_size": 4},
    "sapiens2": {"num_key_value_heads_per_layer": [4, 2]},
    "sam3_lite_text_text_model": {"num_hidden_layers": 4},  # the first and last have no attention
    "longcat_flash": {"zero_expert_num": 1},
    "step3p7": {"text_config.sliding_window": 4},
    "glm5_next_text": {"index_topk": 4, "index_kpool": 2},
    "glm5_next": {"text_config.index_topk": 4, "text_config.index_kpool": 2},
    "hunyuan_vl_text": {"rope_parameters": HUNYUAN_ROPE},
    "hunyuan_vl": {"text_config.rope_parameters": HUNYUAN_ROPE},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": None,
    },
    "llama4_text": LLAMA4,
    "llama4": {"vision_config.intermediate_size": 128}
    | {f"text_config.{name}": value for name, value in LLAMA4.items()},
    "mistral_large4_text": MISTRAL_LARGE4,
    "mistral_large4": {f"text_config.{name}": value for name, value in MISTRAL_LARGE4.items()},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"hidden_size": 32, "intermediate_size": 64, "mamba_d_ssm": 64},
    "florence2": {"vision_config.embed_dim": [32] * 4, "vision_config.depths": [1] * 4,
                  "vision_config.num_heads": [4] * 4, "vision_config.num_groups": [4] * 4},
    "emu3": {"vocabulary_map": {"<image>": 90}, "vq_config.base_channels": 32,
             "vq_config.channel_multiplier": [1, 1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "llava_next": {"image_grid_pinpoints": [[32, 64], [64, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 64], [64, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 64], [64, 32]]},
    "sam": {"vision_config.output_channels": 32, "vision_config.num_pos_feats": 16},
    "sam_hq": {"vision_config.output_channels": 32, "vision_config.num_pos_feats": 16},
    "deepseek_v2": {"num_experts_per_tok": 2, "num_key_value_heads": 4},
    "bridgetower": {  # a head of its vision model has 64 numbers
        "hidden_size": 128, "text_config.hidden_size": 128, "vision_config.hidden_size": 128,
    },
    "timesfm": {"context_length": 128},  # a patch of the series has 32 numbers
    "timesfm2_5": {"context_length": 128},
    "swin": {"image_size": 64, "window_size": 2},
    "donut-swin": {"image_size": 64, "window_size": 2},
    "layoutlmv3": {"input_size": 32, "patch_size": 8, "coordinate_size": 6, "shape_size": 4},
    "bros": {"dim_bbox_sinusoid_emb_2d": 32, "dim_bbox_sinusoid_emb_1d": 4,
             "dim_bbox_projection": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "funnel": {"architectures": ["FunnelModel"]},
    "autoformer": {"label_length": 4},
    "clvp": {"text_config.hidden_size": 128, "speech_config.hidden_size": 128,
             "decoder_config.hidden_size": 128},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_top_k": 2},
    },
    "diffusion_gemma": {"text_config.num_global_key_value_heads": 2,
                        "text_config.global_head_dim": 8, "text_config.num_experts": 4,
                        "text_config.top_k_experts": 2, "text_config.moe_intermediate_size": 64},
    "mllama": {"vision_config.intermediate_layers_indices": [0, 1],
               "vision_config.vision_output_dim": 96},
    "cohere_compass_text": COMPASS,
    "cohere_compass": {f"text_config.{name}": value for name, value in COMPASS.items()},
}  # fmt: skip
Overrides = dict[str, Any]
# What follows from other values when a config leaves it open.
DERIVED = {
    "head_dim", "num_key_value_heads", "layer_types", "hidden_dim", "qk_head_dim",
    "attention_hidden_size", "attention_head_dim",
}  # fmt: skip


def small_config(model_type: str) -> PreTrainedConfig:
    """Return the first config of this type, from small to less small, of which a model is built."""
    reasons = []
    for changes in _attempts():
        try:
            config = _shrunk(AutoConfig.for_model(model_type), changes, _exceptions(model_type))
            with torch.device("meta"):
                AutoModel.from_config(config)
        except ImportError:
            raise
        except Exception as error:  # a size that this type does not accept: the next attempt
            reasons.append(error)
        else:
            return config
    raise reasons[0]


def small_model(model_type: str) -> nn.Module:
    """Return a small model of this type with weights far from zero, ready to be read."""
    config = small_config(model_type)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModel.from_config(config, dtype=torch.float32)
        widen(model)
    return model.eval()


def _attempts() -> Iterator[frozenset[str]]:
    everything = frozenset({"layers", "kv", "heads", "head_dim", "width", "tokens", "fixed"})
    yield everything
    yield everything | {"forced"}
    yield everything - {"kv"} | {"all_kv"}
    yield everything - {"head_dim"}
    yield everything - {"head_dim", "kv"}
    yield everything - {"head_dim", "kv", "heads"}
    yield everything - {"fixed"}
    yield everything - {"head_dim", "kv", "heads", "width", "fixed"}
    yield frozenset({"layers", "tokens"})
    yield frozenset({"layers"})


def _exceptions(model_type: str) -> dict[str, Any]:
    return EXCEPTIONS.get(model_type, {})


def _shrunk(
    config: PreTrainedConfig,
    changes: frozenset[str],
    exceptions: Mapping[str, Any],
    tokens: dict[int, int] | None = None,
) -> PreTrainedConfig:
    """Return a config of the same class with small values, its sub-configs shrunk first."""
    kind = type(config)
    tokens = {} if tokens is None else tokens
    given: Overrides = {}
    for field in dataclasses.fields(kind):
        name = field.name
        if not field.init or name not in vars(config):
            continue
        value = vars(config)[name]
        if isinstance(value, PreTrainedConfig):
            inner = {
                key.removeprefix(f"{name}."): item
                for key, item in exceptions.items()
                if key.startswith(f"{name}.")
            }
            given[name] = _shrunk(value, changes, inner, tokens)
            continue
        known = FORCED if "forced" in changes else OPEN
        if value is None and name in known:
            given[name] = known[name]
            continue
        default = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        small = _small_value(name, value, changes, tokens, config)
        if default is None and name not in FIXED and not TOKENS.fullmatch(name):
            small = value if small is value else None if name in DERIVED else small
            if small is value and not isinstance(value, dict):
                continue  # follows from the other values when the config is made
        if small is not None and (small != default or small is not value):
            given[name] = small
    given |= _layer_lists(config, given)
    if config.model_type.startswith(SECTIONED) and "rope_parameters" in vars(config):
        rope = given.get("rope_parameters") or vars(config)["rope_parameters"] or {}
        given["rope_parameters"] = _small_rope({"mrope_section": [1, 1, 1], **rope})
    heads = vars(config).get("num_heads")
    if isinstance(heads, (list, tuple)) and isinstance(vars(config).get("embed_dim"), int):
        given["embed_dim"] = HEAD_DIM * heads[0]
    given |= {key: value for key, value in exceptions.items() if "." not in key}
    given = {key: value for key, value in given.items() if value is not None or key in exceptions}
    return kind(**given)


def _small_value(
    name: str, value: Any, changes: frozenset[str], tokens: dict[int, int], config: PreTrainedConfig
) -> Any:
    """Return what an attribute of this name and value becomes."""
    if name in FIXED and "fixed" in changes and value is not None:
        small = FIXED[name]
        if isinstance(value, (list, tuple)) and isinstance(small, int):
            if all(isinstance(item, int) for item in value):
                return type(value)([min(small, item) for item in value])
            return value
        if isinstance(small, tuple) != isinstance(value, (list, tuple)):
            return value
        if isinstance(value, bool) or not isinstance(value, int) or small is None:
            return value if small is None else small
        return min(small, value) if not TOKENS.fullmatch(name) else small
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _small_rope(value) if "width" in changes else value
    if name == "depths" and isinstance(value, (list, tuple)):
        return type(value)([min(item, 2) for item in value])
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if TOKENS.fullmatch(name) and "tokens" in changes:
        if value < VOCABULARY:
            return value
        if value not in tokens:
            tokens[value] = VOCABULARY - 1 - len(tokens)
        return tokens[value]
    if VOCABULARIES.fullmatch(name) and "tokens" in changes:
        return min(value, VOCABULARY)
    if LAYERS.fullmatch(name) and name not in KEPT_LAYERS:
        return min(value, _layers_needed(config, value)) if "layers" in changes else value
    if KV_HEADS.fullmatch(name):
        if value <= 1:
            return value
        if vars(config).get("kv_lora_rank"):
            return HEADS  # multi-head latent attention has no groups
        return HEADS if "all_kv" in changes else KEY_VALUE_HEADS if "kv" in changes else value
    if EXPERTS.fullmatch(name):
        return min(value, 4)
    if HEAD_DIMS.fullmatch(name):
        return HEAD_DIM if "head_dim" in changes and value > HEAD_DIM else value
    if HEAD_COUNTS.fullmatch(name):
        return min(value, HEADS) if "heads" in changes else value
    if "width" in changes and value > HIDDEN:
        if FEED_FORWARDS.fullmatch(name):
            return FEED_FORWARD
        if WIDTHS.fullmatch(name):
            return HIDDEN
    return value


def _small_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return rope parameters whose sections fit a head of eight."""
    small = {
        key: _small_rope(item) if isinstance(item, dict) else item for key, item in rope.items()
    }
    sections = small.get("mrope_section")
    if isinstance(sections, (list, tuple)):
        share = small.get("partial_rotary_factor") or 1.0
        left = max(1, int(HEAD_DIM * share) // 2)
        counts = [left // len(sections)] * len(sections)
        for index in range(left - sum(counts)):
            counts[index] += 1
        small["mrope_section"] = counts
    return small


def _kinds(config: PreTrainedConfig, count: int) -> list[tuple[str, ...]] | None:
    """Return the kinds of the layers, told by every list with one entry per layer."""
    lists = [
        value
        for name, value in sorted(vars(config).items())
        if isinstance(value, (list, tuple)) and len(value) == count and count > 2
    ]
    return [tuple(map(str, kinds)) for kinds in zip(*lists, strict=True)] if lists else None


def _layers_needed(config: PreTrainedConfig, count: int) -> int:
    """Return how many layers from the first on hold every kind of layer: at least two."""
    kinds = _kinds(config, count)
    if kinds is None:
        return 2
    needed = 1 + max(kinds.index(kind) for kind in set(kinds))
    return max(2, needed) if needed <= 6 else max(2, len(set(kinds)))


def _layer_lists(config: PreTrainedConfig, given: Overrides) -> Overrides:
    """Return the lists with one entry per layer, cut to the number of layers."""
    changed: Overrides = {}
    fields = {field.name for field in dataclasses.fields(type(config))}
    for name, count in list(given.items()):
        if not LAYERS.fullmatch(name) or not isinstance(count, int):
            continue
        before = vars(config)[name]
        kinds = _kinds(config, before)
        if kinds is None or before == count:
            continue
        first = sorted({kind: index for index, kind in reversed(list(enumerate(kinds)))}.values())
        chosen = list(range(count)) if set(kinds[:count]) == set(kinds) else first[:count]
        for key, value in vars(config).items():
            if isinstance(value, (list, tuple)) and len(value) == before and key in fields:
                changed[key] = type(value)([value[index] for index in chosen])
    return changed
