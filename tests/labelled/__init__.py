"""An independent truth about models that no table describes: what a reader is judged by.

    from labelled import LABELLED, expected

    case = LABELLED["before-query"]
    model = case.build()
    for label in expected(case, model):  # empty if case.refused says why only a refusal is honest
        label.name, label.role, label.rows
    disagreements(expected(case, model), fl.anatomy(model).parts, model)  # one line for each

`DECOYS` mislead by a name, an order or a pattern; `WRITTEN` are GPTs as people write them;
`OUTSIDE` is x-transformers, where it is installed; `VISION` are models of timm and torchvision,
which `make outside` fetches and `LABELLED` does without. `TYPES` are Hugging Face model types that
no table describes, read in transformers 5.22:

    encoders  camembert, data2vec-text, esm, roformer, squeezebert, nystromformer, longformer
    decoders  granite, olmo2, persimmon, stablelm, cohere, starcoder2, glm, gemma3_text, codegen,
              biogpt, xglm, ctrl, openai-gpt, gpt_neox_japanese
    pairs     mbart, pegasus, m2m_100, led, prophetnet, siglip
    senses    dinov2, deit, beit, swin, segformer, levit, audio-spectrogram-transformer, hubert
    mixtures  mixtral, qwen3_moe, deepseek_v3, dbrx, jamba, bamba, qwen3_next, minimax, and mamba
              and rwkv, which have no attention
"""

from labelled.decoders import DECODERS
from labelled.decoys import DECOYS
from labelled.encoders import ENCODERS
from labelled.judge import disagreements
from labelled.mixtures import MIXTURES, NO_ATTENTION
from labelled.own import OUTSIDE, WRITTEN
from labelled.pairs import PAIRS
from labelled.senses import SENSES
from labelled.truth import NEW_ROLES, Label, Labelled, expected, matches
from labelled.vision import VISION

TYPES: dict[str, Labelled] = {
    **ENCODERS,
    **DECODERS,
    **PAIRS,
    **SENSES,
    **MIXTURES,
    **NO_ATTENTION,
}
LABELLED: dict[str, Labelled] = {**DECOYS, **WRITTEN, **OUTSIDE, **TYPES}

__all__ = [
    "DECOYS",
    "LABELLED",
    "NEW_ROLES",
    "OUTSIDE",
    "TYPES",
    "VISION",
    "WRITTEN",
    "Label",
    "Labelled",
    "disagreements",
    "expected",
    "matches",
]
