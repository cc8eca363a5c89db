"""The architectures that frostlab knows; importing this package registers them."""

from frostlab.roles.architectures import decoders, encoders, native, seq2seq

__all__ = ["decoders", "encoders", "native", "seq2seq"]
