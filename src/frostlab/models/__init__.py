"""Models: frostlab's own, and Hugging Face ones by name."""

from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "Decoder", "DecoderConfig", "GPTConfig"]
