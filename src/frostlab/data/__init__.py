"""Data: text or synthetic tasks as token arrays, divided honestly, prepared once."""

from frostlab.data.prepare import prepare
from frostlab.data.tokens import Prepared, Tokens

__all__ = ["Prepared", "Tokens", "prepare"]
