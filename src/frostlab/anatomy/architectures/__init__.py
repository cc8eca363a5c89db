"""The architectures frostlab knows; importing this makes them known."""

from frostlab.anatomy.architectures import decoders, encoders, native, seq2seq

__all__ = ["decoders", "encoders", "native", "seq2seq"]
