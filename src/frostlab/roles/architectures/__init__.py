"""The architectures frostlab knows; importing this makes them known."""

from frostlab.roles.architectures import decoders, encoders, native, seq2seq

__all__ = ["decoders", "encoders", "native", "seq2seq"]
