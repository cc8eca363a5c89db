"""Encoders of text, labelled by their forward passes.

The comment before a truth names the lines of `modeling_….py` in transformers 5.22 that prove it.
"""

from labelled.truth import Entry, Labelled, Table, typed, under
from zoo import SIZES, Inputs, words

EMBEDDINGS: Table = {
    "embeddings.word_embeddings": "embedding",
    "embeddings.token_type_embeddings": "embedding",
    "embeddings.position_embeddings": "position",
    "embeddings.LayerNorm": "norm",
}
POOLER: Table = {"pooler.dense": "head"}
ATTENTION: Table = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "output",
}
FEED_FORWARD: Table = {"intermediate.dense": "up", "output.dense": "down"}
NORMS_AFTER: Table = {"attention.output.LayerNorm": "norm", "output.LayerNorm": "norm"}
LAYER: Table = {**ATTENTION, **FEED_FORWARD, **NORMS_AFTER}
BERT: Table = {**EMBEDDINGS, **under("encoder.layer.{i}", LAYER), **POOLER}

ESM: dict[str, Entry] = {
    "embeddings.word_embeddings": "embedding",
    "embeddings.position_embeddings": "position",
    "embeddings.layer_norm": "norm",
    **under("encoder.layer.{i}", ATTENTION),
    **under("encoder.layer.{i}", FEED_FORWARD),
    "encoder.layer.{i}.attention.LayerNorm": "norm",
    "encoder.layer.{i}.LayerNorm": "norm",
    "encoder.emb_layer_norm_after": "norm",
    **POOLER,
    "contact_head.regression": "head|other",  # used by predict_contacts alone
}
ROFORMER: dict[str, Entry] = {
    "embeddings.word_embeddings": "embedding",
    "embeddings.token_type_embeddings": "embedding",
    "embeddings.LayerNorm": "norm",
    "embeddings_project": "embedding",
    "encoder.embed_positions": "position",  # sinusoids, never trained
    **under("encoder.layer.{i}", LAYER),
}
SQUEEZEBERT: dict[str, Entry] = {
    **EMBEDDINGS,
    "encoder.layers.{i}.attention.query": "query",
    "encoder.layers.{i}.attention.key": "key",
    "encoder.layers.{i}.attention.value": "value",
    "encoder.layers.{i}.post_attention.conv1d": "output",
    "encoder.layers.{i}.post_attention.layernorm": "norm",
    "encoder.layers.{i}.intermediate.conv1d": "up",
    "encoder.layers.{i}.output.conv1d": "down",
    "encoder.layers.{i}.output.layernorm": "norm",
    **POOLER,
}
NYSTROMFORMER: dict[str, Entry] = {
    **EMBEDDINGS,
    **under("encoder.layer.{i}", LAYER),
    "encoder.layer.{i}.attention.self.conv": "conv",
}
# Without a mask of tokens with global attention, the three global projections are never called.
GLOBAL: Table = {
    "query_global": "query|other",
    "key_global": "key|other",
    "value_global": "value|other",
}
LONGFORMER: dict[str, Entry] = {
    **BERT,
    **under("encoder.layer.{i}.attention.self", GLOBAL),
}


def eight_words() -> Inputs:
    return {"input_ids": words(length=8)}  # as many as `segment_means_seq_len`


def some_global() -> Inputs:
    """Words of which the first attends to all."""
    ids = words()
    mask = ids.new_zeros(ids.shape)
    mask[:, 0] = 1
    return {"input_ids": ids, "global_attention_mask": mask}


ENCODERS: dict[str, Labelled] = {
    # modeling_camembert.py 222-224 (q, k, v), 172-180, 383 (activation), 659 (pooler)
    "camembert": typed("camembert", SIZES, BERT),
    # modeling_data2vec_text.py 221-223, 171-179, 382, 622
    "data2vec-text": typed("data2vec-text", SIZES, BERT),
    # modeling_esm.py 354-360, norms before: 421 and 510; 257, 441, 545, 791 (contact head)
    "esm": typed(
        "esm",
        SIZES | {"pad_token_id": 1, "mask_token_id": 2, "emb_layer_norm_before": True},
        ESM,
    ),
    # modeling_roformer.py 150, 175-176, rotation 185, 197-211, 427 (sinusoids), 725
    "roformer": typed("roformer", SIZES | {"embedding_size": 16}, ROFORMER),
    # modeling_squeezebert.py 171-173 (grouped convolutions), 216-238, 181-198 (heads of channels)
    "squeezebert": typed("squeezebert", SIZES | {"embedding_size": 32}, SQUEEZEBERT),
    # modeling_nystromformer.py 164-166, 197-209 (three softmaxes), 212 (convolution of values)
    "nystromformer": typed(
        "nystromformer",
        SIZES | {"num_landmarks": 2, "segment_means_seq_len": 8, "conv_kernel_size": 3},
        NYSTROMFORMER,
        eight_words,
    ),
    # modeling_longformer.py 504-506, 519, 574, 602; global: 962-964, 1012
    "longformer": typed(
        "longformer", SIZES | {"attention_window": [4, 4]}, LONGFORMER, some_global
    ),
}
