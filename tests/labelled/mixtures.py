"""Experts, low-rank attention, and state-space or linear-attention layers beside attention.

Labelled by their forward passes: the comment before a truth names the lines of `modeling_….py` in
transformers 5.22 that prove it. The weights of experts lie in one tensor, (experts, rows, columns).
"""

from labelled.decoders import ATTENTION, GATED, HEAD_NORMS, SMALL, TWO_NORMS, body
from labelled.truth import Entry, Labelled, Table, Whole, shares, typed, under
from zoo import SIZES, SPECIAL


def experts(width: int) -> Table:
    """Return the table of experts with a gate."""
    return {
        "experts.gate_up_proj": shares(("gate", width), ("up", width), axis=1),
        "experts.down_proj": "down",
    }


def routed(width: int) -> Table:
    """Return the table of experts and of what chooses them."""
    return {"mlp.gate": "router", **under("mlp", experts(width))}


DEEPSEEK: Table = {
    "self_attn.q_a_proj": Whole("query", heads=0),  # feeds the queries alone
    "self_attn.q_a_layernorm": "norm",
    "self_attn.q_b_proj": "query",
    # 16 rows that keys and values come from, and 4 that are a part of every head's key
    "self_attn.kv_a_proj_with_mqa": shares(("latent", 16), ("key", 4, 1)),
    "self_attn.kv_a_layernorm": "norm",
    "self_attn.kv_b_proj": shares(("key", 8), ("value", 6), repeats=4),
    "self_attn.o_proj": "output",
}
SHARED_EXPERTS: Table = {
    "mlp.shared_experts.gate_proj": "gate",
    "mlp.shared_experts.up_proj": "up",
    "mlp.shared_experts.down_proj": "down",
}
DBRX: dict[str, Entry] = {
    "wte": "embedding",
    "blocks.{i}.norm_attn_norm.norm_1": "norm",
    "blocks.{i}.norm_attn_norm.attn.Wqkv": shares(("query", 32), ("key", 16), ("value", 16)),
    "blocks.{i}.norm_attn_norm.attn.out_proj": "output",
    "blocks.{i}.norm_attn_norm.norm_2": "norm",
    "blocks.{i}.ffn.router.layer": "router",
    "blocks.{i}.ffn.experts.mlp.w1": "gate",
    "blocks.{i}.ffn.experts.mlp.v1": "up",
    "blocks.{i}.ffn.experts.mlp.w2": "down",
    "norm_f": "norm",
}
MAMBA: Table = {
    "mamba.A_log": "recurrent",
    "mamba.D": "recurrent",
    "mamba.conv1d": "conv",
    "mamba.in_proj": "recurrent",
    "mamba.out_proj": "recurrent",
}
JAMBA = body(
    MAMBA,
    ATTENTION,
    {
        "mamba.x_proj": "recurrent",
        "mamba.dt_proj": "recurrent",
        "mamba.dt_layernorm": "norm",
        "mamba.b_layernorm": "norm",
        "mamba.c_layernorm": "norm",
        "feed_forward.gate_proj": "gate",
        "feed_forward.up_proj": "up",
        "feed_forward.down_proj": "down",
        "feed_forward.router": "router",
        "input_layernorm": "norm",
        "pre_ff_layernorm": "norm",
    },
    under("feed_forward", experts(64)),
    norm="final_layernorm",
)
BAMBA = body(
    MAMBA,
    ATTENTION,
    {
        "mamba.dt_bias": "recurrent",
        "mamba.norm": "norm",  # gated
        "feed_forward.gate_proj": "gate",
        "feed_forward.up_proj": "up",
        "feed_forward.down_proj": "down",
        "input_layernorm": "norm",
        "pre_ff_layernorm": "norm",
    },
    norm="final_layernorm",
)
DELTA_NET: Table = {
    "linear_attn.dt_bias": "recurrent",
    "linear_attn.A_log": "recurrent",
    "linear_attn.conv1d": "conv",
    "linear_attn.in_proj_qkvz": "recurrent",
    "linear_attn.in_proj_ba": "recurrent",
    "linear_attn.norm": "norm",  # gated
    "linear_attn.out_proj": "recurrent",
}
QWEN3_NEXT = body(
    DELTA_NET,
    {
        # of each head, 8 rows of queries and 8 whose sigmoid multiplies what the head mixed
        "self_attn.q_proj": shares(("query", 8), ("gate|other", 8), repeats=4),
        "self_attn.k_proj": "key",
        "self_attn.v_proj": "value",
        "self_attn.o_proj": "output",
        "mlp.shared_expert.gate_proj": "gate",
        "mlp.shared_expert.up_proj": "up",
        "mlp.shared_expert.down_proj": "down",
        "mlp.shared_expert_gate": "gate|router|other",  # one number a token; it chooses nothing
    },
    HEAD_NORMS,
    routed(24),
    TWO_NORMS,
)
LIGHTNING: Table = {
    "self_attn.qkv_proj": "recurrent",
    "self_attn.out_proj": "recurrent",
    "self_attn.output_gate": "recurrent",
    "self_attn.norm": "norm",
}

MIXTURES: dict[str, Labelled] = {
    # modeling_mixtral.py 299-301, 326, 105-110 (router), 86-87 (experts)
    "mixtral": typed(
        "mixtral",
        SMALL | {"num_local_experts": 3, "num_experts_per_tok": 2},
        body(ATTENTION, routed(64), TWO_NORMS),
        heads=(4, 2),
    ),
    # modeling_qwen3_moe.py 161-163, 188, 259-266 (router), 239-240; the first layer has no experts
    "qwen3_moe": typed(
        "qwen3_moe",
        SMALL
        | {
            "head_dim": 16,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
        },
        body(ATTENTION, HEAD_NORMS, GATED, routed(24), TWO_NORMS),
        heads=(4, 2),
    ),
    # modeling_deepseek_v3.py 440-446, 416-423 (keys and values by head), 481, 192, 221
    "deepseek_v3": typed(
        "deepseek_v3",
        SIZES
        | SPECIAL
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
        },
        body(DEEPSEEK, GATED, routed(24), SHARED_EXPERTS, TWO_NORMS),
    ),
    # modeling_dbrx.py 203-207, 242, 263-267 (experts), 299-302 (one after another in the rows), 323
    "dbrx": typed(
        "dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "vocab_size": 99,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 50.0, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 24,
                "moe_num_experts": 3,
                "moe_top_k": 2,
                "hidden_size": 32,
            },
        }
        | SPECIAL,
        DBRX,
        heads=(4, 2),
    ),
    # modeling_jamba.py 181-183, 204; state space: 523-620; 671 and 692 (experts)
    "jamba": typed(
        "jamba",
        SMALL
        | {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 4,
        },
        JAMBA,
        heads=(4, 2),
    ),
    # modeling_bamba.py 219-221, 245; state space: 668-794; 810
    "bamba": typed(
        "bamba",
        SMALL
        | {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 4,
        },
        BAMBA,
        heads=(4, 2),
    ),
    # modeling_qwen3_next.py 269-302 (the gate in q_proj); linear attention: 618-645; 853-857
    "qwen3_next": typed(
        "qwen3_next",
        SMALL
        | {
            "head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention", "full_attention"],
        },
        QWEN3_NEXT,
        heads=(4, 2),
    ),
    # modeling_minimax.py 186-190 and below: linear attention, no softmax; 461 and 500 (experts)
    "minimax": typed(
        "minimax",
        SMALL
        | {
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["linear_attention", "full_attention"],
            "block_size": 4,
            "head_dim": 8,
        },
        body(LIGHTNING, ATTENTION, routed(64), TWO_NORMS),
        heads=(4, 2),
    ),
}
# No attention at all: no token's scores of the others, no softmax over tokens.
NO_ATTENTION: dict[str, Labelled] = {
    # modeling_mamba.py, MambaMixer.forward: a scan over a state
    "mamba": typed(
        "mamba",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "vocab_size": 99,
            "state_size": 4,
            "time_step_rank": 4,
        }
        | SPECIAL,
        {},
        refused="no attention: a state-space model",
    ),
    # modeling_rwkv.py, RwkvSelfAttention.forward: modules named key and value, and a recurrence
    "rwkv": typed(
        "rwkv",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "vocab_size": 99,
            "context_length": 64,
            "attention_hidden_size": 32,
        }
        | SPECIAL,
        {},
        refused="no attention: a recurrence whose weights are called key and value",
    ),
}
