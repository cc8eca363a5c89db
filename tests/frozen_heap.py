"""Imported last by the server that children are forked from: what it holds is never collected."""

import gc

from frostlab.records.environment import environment

environment("cpu")  # what does not change is looked up once
gc.collect()
gc.freeze()
