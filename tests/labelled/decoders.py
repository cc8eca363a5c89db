"""Decoders of text, labelled by their forward passes.

The comment before a truth names the lines of `modeling_….py` in transformers 5.22 that prove it.
"""

from labelled.truth import Entry, Labelled, Table, Whole, shares, typed, under
from zoo import GPT_SIZES, GROUPED, SIZES, SPECIAL

ATTENTION: Table = {
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "output",
}
GATED: Table = {"mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}
HEAD_NORMS: Table = {"self_attn.q_norm": "norm", "self_attn.k_norm": "norm"}
INPUT_NORM: Table = {"input_layernorm": "norm"}
TWO_NORMS: Table = {**INPUT_NORM, "post_attention_layernorm": "norm"}
NEOX: Table = {"mlp.dense_h_to_4h": "up", "mlp.dense_4h_to_h": "down"}
PER_HEAD = shares(("query", 8), ("key", 8), ("value", 8), repeats=4)
SMALL = GROUPED | SPECIAL


def body(*layer: Table, norm: str = "norm") -> dict[str, Entry]:
    """Return the table of an embedding, layers and a last norm."""
    table: dict[str, Entry] = {"embed_tokens": "embedding", norm: "norm"}
    for part in layer:
        table |= under("layers.{i}", part)
    return table


FAIRSEQ: Table = {
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.out_proj": "output",
    "self_attn_layer_norm": "norm",
    "fc1": "up",
    "fc2": "down",
    "final_layer_norm": "norm",
}
PERSIMMON = body(
    {
        "self_attn.query_key_value": PER_HEAD,
        "self_attn.dense": "output",
        "self_attn.q_layernorm": "norm",
        "self_attn.k_layernorm": "norm",
    },
    NEOX,
    TWO_NORMS,
    norm="final_layernorm",
)
NEOX_JAPANESE: dict[str, Entry] = {
    "embed_in": "embedding",
    "layers.{i}.attention.query_key_value": PER_HEAD,
    "layers.{i}.attention.dense": "output",
    "layers.{i}.attention.dense_bias": Whole("output", kind="bias"),  # in the last layer only
    **under("layers.{i}", NEOX),
    **under("layers.{i}", TWO_NORMS),
    "final_layer_norm": "norm",
}
CODEGEN: dict[str, Entry] = {
    "wte": "embedding",
    "h.{i}.ln_1": "norm",
    # four blocks of rows, in each the queries, values and keys of two heads
    "h.{i}.attn.qkv_proj": shares(("query", 8), ("value", 8), ("key", 8), repeats=4),
    "h.{i}.attn.out_proj": "output",
    "h.{i}.mlp.fc_in": "up",
    "h.{i}.mlp.fc_out": "down",
    "ln_f": "norm",
}
CTRL: dict[str, Entry] = {
    "w": "embedding",
    "h.{i}.multi_head_attention.Wq": "query",
    "h.{i}.multi_head_attention.Wk": "key",
    "h.{i}.multi_head_attention.Wv": "value",
    "h.{i}.multi_head_attention.dense": "output",
    "h.{i}.ffn.0": "up",
    "h.{i}.ffn.2": "down",
    "h.{i}.layernorm1": "norm",
    "h.{i}.layernorm2": "norm",
    "layernorm": "norm",
}
OPENAI_GPT: dict[str, Entry] = {
    "tokens_embed": "embedding",
    "positions_embed": "position",
    "h.{i}.attn.c_attn": shares(("query", 32), ("key", 32), ("value", 32)),
    "h.{i}.attn.c_proj": "output",
    "h.{i}.ln_1": "norm",
    "h.{i}.mlp.c_fc": "up",
    "h.{i}.mlp.c_proj": "down",
    "h.{i}.ln_2": "norm",
}

DECODERS: dict[str, Labelled] = {
    # modeling_granite.py 151-153, 177, 214
    "granite": typed("granite", SMALL, body(ATTENTION, GATED, TWO_NORMS), heads=(4, 2)),
    # modeling_olmo2.py 227-228: one norm over all heads; 307 and 313: norms after the sublayers
    "olmo2": typed(
        "olmo2",
        SMALL,
        body(
            ATTENTION,
            GATED,
            HEAD_NORMS,
            {"post_attention_layernorm": "norm", "post_feedforward_layernorm": "norm"},
        ),
        heads=(4, 2),
    ),
    # modeling_persimmon.py 229-230: (heads, 3, size); 148-150, 252-253
    "persimmon": typed("persimmon", SIZES | SPECIAL | {"qk_layernorm": True}, PERSIMMON),
    # modeling_stablelm.py 161-168: a norm for each head; 275-276, 368
    "stablelm": typed(
        "stablelm",
        SMALL | {"qk_layernorm": True},
        body(
            ATTENTION,
            GATED,
            TWO_NORMS,
            {"self_attn.q_layernorm.norms.*": "norm", "self_attn.k_layernorm.norms.*": "norm"},
        ),
        heads=(4, 2),
    ),
    # modeling_cohere.py 254-255, 323: attention and network beside each other, after one norm
    "cohere": typed(
        "cohere",
        SMALL | {"use_qk_norm": True},
        body(ATTENTION, GATED, HEAD_NORMS, INPUT_NORM),
        heads=(4, 2),
    ),
    # modeling_starcoder2.py 169-171, 196, 62-64
    "starcoder2": typed(
        "starcoder2",
        SMALL,
        body(ATTENTION, {"mlp.c_fc": "up", "mlp.c_proj": "down"}, TWO_NORMS),
        heads=(4, 2),
    ),
    # modeling_glm.py 233-235, 57-59: the gate is the first half
    "glm": typed(
        "glm",
        SMALL | {"head_dim": 8},
        body(
            ATTENTION,
            {"mlp.gate_up_proj": shares(("gate", 64), ("up", 64)), "mlp.down_proj": "down"},
            TWO_NORMS,
        ),
        heads=(4, 2),
    ),
    # modeling_gemma3.py 341-346, 371, 131, 399-415
    "gemma3_text": typed(
        "gemma3_text",
        SMALL | {"head_dim": 16},
        body(
            ATTENTION,
            GATED,
            HEAD_NORMS,
            TWO_NORMS,
            {"pre_feedforward_layernorm": "norm", "post_feedforward_layernorm": "norm"},
        ),
        heads=(4, 2),
    ),
    # modeling_codegen.py 152-160: `mp_num = 4`, `query, value, key = torch.split(…)`; 217-219
    "codegen": typed("codegen", GPT_SIZES | {"n_head": 8, "rotary_dim": 4}, CODEGEN, heads=(8, 8)),
    # modeling_biogpt.py 184, 204-205, 232, 295-298, 388
    "biogpt": typed(
        "biogpt",
        SIZES | SPECIAL,
        body(FAIRSEQ, norm="layer_norm") | {"embed_positions": "position"},
    ),
    # modeling_xglm.py 158, 178-179, 246, 335-337; 462: sinusoids in a buffer
    "xglm": typed(
        "xglm",
        {
            "d_model": 32,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 64,
            "vocab_size": 99,
            "max_position_embeddings": 64,
        }
        | SPECIAL,
        body(FAIRSEQ, norm="layer_norm"),
    ),
    # modeling_ctrl.py 124-126, 146, 151, 174-187
    "ctrl": typed(
        "ctrl",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64, "vocab_size": 99, "n_positions": 64}
        | SPECIAL,
        CTRL,
    ),
    # modeling_openai.py 99-109: Conv1D, split; 126-127; norms after the sums: 148-150
    "openai-gpt": typed("openai-gpt", GPT_SIZES, OPENAI_GPT),
    # modeling_gpt_neox_japanese.py 179-185; 159 and 347-349: the bias of `dense` is added apart
    "gpt_neox_japanese": typed("gpt_neox_japanese", SIZES | SPECIAL, NEOX_JAPANESE),
}
