"""Roles of parameters, and of the rows of fused parameters: query, key, value, norm, head, …"""

ROLES = (
    "embedding",
    "position",
    "query",
    "key",
    "value",
    "output",  # output projection of an attention
    "up",  # first projection of a feed-forward network
    "gate",
    "down",  # last projection of a feed-forward network
    "conv",
    "norm",
    "head",
    "other",
    "adapter",  # weight that PEFT added, such as LoRA's
)
