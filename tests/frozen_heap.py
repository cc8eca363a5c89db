"""Imported last by the server that children are forked from: what it holds is never collected."""

import gc

gc.collect()
gc.freeze()
