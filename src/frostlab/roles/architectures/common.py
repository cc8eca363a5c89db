"""Entries and functions that the tables of several architectures share.

A table maps parameter paths to roles (`frostlab.roles.description`).
"""

from typing import Any

from frostlab.roles.description import Entry, Fused, Table
from frostlab.roles.parts import Heads

QKV = Fused(("query", "key", "value"))
QKV_PER_HEAD = Fused(("query", "key", "value"), interleaved=True)
GATE_UP = Fused(("gate", "up"))


def under(prefix: str, table: Table) -> dict[str, Entry]:
    """Return a table with a prefix before every path."""
    return {f"{prefix}.{path}": entry for path, entry in table.items()}


def cross(table: Table) -> dict[str, Entry]:
    """Return a table with its roles marked as cross-attention."""
    return {path: _as_cross(entry) for path, entry in table.items()}


def _as_cross(entry: Entry) -> Entry:
    if isinstance(entry, Fused):
        return Fused(entry.roles, entry.interleaved, cross=True)
    return f"cross.{entry}" if isinstance(entry, str) else entry


def heads_from(config: Any) -> Heads:
    """Read the heads from the standard attributes of a Hugging Face config."""
    count = config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", None) or count
    size = getattr(config, "head_dim", None) or config.hidden_size // count
    return Heads(count, kv, size)


def config_heads(module: Any, stack: str) -> Heads:
    """Return the heads in a model's config, which are the same in all stacks."""
    return heads_from(module.config)


def encoder_decoder_heads(module: Any, stack: str) -> Heads:
    """Return a stack's heads from a config with separate counts for encoder and decoder."""
    config = module.config
    count = getattr(config, f"{stack}_attention_heads")
    return Heads(count, count, config.d_model // count)
