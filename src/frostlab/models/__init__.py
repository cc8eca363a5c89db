"""frostlab's own models, and construction of Hugging Face models by name."""

from frostlab.models.conformer import Conformer, ConformerConfig
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "Conformer", "ConformerConfig", "Decoder", "DecoderConfig", "GPTConfig"]
