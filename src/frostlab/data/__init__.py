"""Data: text or synthetic tasks as token arrays, recordings as windows, divided honestly."""

from frostlab.data.prepare import prepare
from frostlab.data.signals import Material, Signals, Windows, text_of
from frostlab.data.tokens import Prepared, Tokens

__all__ = ["Material", "Prepared", "Signals", "Tokens", "Windows", "prepare", "text_of"]
