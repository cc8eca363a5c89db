"""Tables of encoders: BERT and its relatives.

Each table maps parameter paths to roles; `frostlab.roles.description` defines the patterns.
"""

from typing import Any

from frostlab.roles.architectures.common import GATE_UP, QKV, config_heads, cross, under
from frostlab.roles.description import Description, Entry, Fixed, Table, register

BERT_ATTENTION: Table = {
    "self.query": "query",
    "self.key": "key",
    "self.value": "value",
    "output.dense": "output",
}
BERT_FEED_FORWARD: Table = {
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm",
}
BERT_EMBEDDINGS: Table = {  # embeddings and pooler
    "embeddings.word_embeddings": "embedding",
    "embeddings.token_type_embeddings": "embedding",
    "embeddings.position_embeddings": "position",
    "embeddings.LayerNorm": "norm",
    "pooler.**": "head",
}
BERT: Table = {
    **BERT_EMBEDDINGS,
    "embeddings_project": "embedding",  # in an ELECTRA whose embedding is narrower than its layers
    **under("encoder.layer.{i}.attention", BERT_ATTENTION),
    "encoder.layer.{i}.attention.output.LayerNorm": "norm",
    **under("encoder.layer.{i}.crossattention", cross(BERT_ATTENTION)),
    "encoder.layer.{i}.crossattention.output.LayerNorm": "norm",
    **under("encoder.layer.{i}", BERT_FEED_FORWARD),
}
for kind in ("bert", "roberta", "xlm-roberta", "electra"):
    register(kind, Description(BERT, config_heads))

MPNET: Table = {
    **BERT_EMBEDDINGS,
    "encoder.layer.{i}.attention.attn.q": "query",
    "encoder.layer.{i}.attention.attn.k": "key",
    "encoder.layer.{i}.attention.attn.v": "value",
    "encoder.layer.{i}.attention.attn.o": "output",
    "encoder.layer.{i}.attention.LayerNorm": "norm",
    **under("encoder.layer.{i}", BERT_FEED_FORWARD),
    "encoder.relative_attention_bias": "position",
}
register("mpnet", Description(MPNET, config_heads))

DEBERTA_V2: Table = {
    **BERT_EMBEDDINGS,
    "embeddings.embed_proj": "embedding",
    "encoder.layer.{i}.attention.self.query_proj": "query",
    "encoder.layer.{i}.attention.self.key_proj": "key",
    "encoder.layer.{i}.attention.self.value_proj": "value",
    "encoder.layer.{i}.attention.self.pos_key_proj": "position",
    "encoder.layer.{i}.attention.self.pos_query_proj": "position",
    "encoder.layer.{i}.attention.output.dense": "output",
    "encoder.layer.{i}.attention.output.LayerNorm": "norm",
    **under("encoder.layer.{i}", BERT_FEED_FORWARD),
    "encoder.rel_embeddings": "position",
    "encoder.LayerNorm": "norm",
    "encoder.conv.conv": "conv",
    "encoder.conv.LayerNorm": "norm",
}
register("deberta-v2", Description(DEBERTA_V2, config_heads))


def distilbert(module: Any) -> Table:
    """Return DistilBERT's table; sinusoidal positions are never trained."""
    fixed = module.config.sinusoidal_pos_embds
    layer: dict[str, Entry] = {
        "attention.q_lin": "query",
        "attention.k_lin": "key",
        "attention.v_lin": "value",
        "attention.out_lin": "output",
        "sa_layer_norm": "norm",
        "ffn.lin1": "up",
        "ffn.lin2": "down",
        "output_layer_norm": "norm",
    }
    return {
        "embeddings.word_embeddings": "embedding",
        "embeddings.position_embeddings": Fixed("position") if fixed else "position",
        "embeddings.LayerNorm": "norm",
        **under("transformer.layer.{i}", layer),
    }


register("distilbert", Description(distilbert, config_heads))

ALBERT: Table = {
    **BERT_EMBEDDINGS,
    "pooler": "head",
    "encoder.embedding_hidden_mapping_in": "embedding",
    **under(
        "encoder.albert_layer_groups.{i}.albert_layers.*",
        {
            "attention.query": "query",
            "attention.key": "key",
            "attention.value": "value",
            "attention.dense": "output",
            "attention.LayerNorm": "norm",
            "full_layer_layer_norm": "norm",
            "ffn": "up",
            "ffn_output": "down",
        },
    ),
}


def albert_layers(module: Any, group: int) -> tuple[int, ...]:
    """Return the layers that share one group of ALBERT's weights."""
    config = module.config
    per_group = config.num_hidden_layers / config.num_hidden_groups
    return tuple(i for i in range(config.num_hidden_layers) if int(i / per_group) == group)


register("albert", Description(ALBERT, config_heads, shared=albert_layers))

MODERNBERT: Table = {
    "embeddings.tok_embeddings": "embedding",
    "embeddings.norm": "norm",
    "layers.{i}.attn.Wqkv": QKV,
    "layers.{i}.attn.Wo": "output",
    "layers.{i}.attn_norm": "norm",
    "layers.{i}.mlp_norm": "norm",
    "layers.{i}.mlp.Wi": GATE_UP,  # the gate is the half with the activation function
    "layers.{i}.mlp.Wo": "down",
    "final_norm": "norm",
}
register("modernbert", Description(MODERNBERT, config_heads))
