"""Commands of `frostlab`: thin functions that import torch only if they need it."""
