"""Roles of parameters, and of the rows of fused parameters: query, key, value, norm, head, …"""

ROLES = (
    "embedding",
    "position",
    "query",
    "key",
    "value",
    "latent",  # low-rank projection that several of query, key and value are computed from
    "output",  # output projection of an attention
    "up",  # first projection of a feed-forward network
    "gate",  # its result multiplies that of another weight, such as `up`
    "down",  # last projection of a feed-forward network
    "router",  # chooses among experts
    "recurrent",  # weight of a state-space or linear-attention layer
    "conv",
    "norm",
    "head",  # last layers of the model, such as a classifier; no head of an attention
    "other",
    "adapter",  # weight that PEFT added, such as LoRA's
)
