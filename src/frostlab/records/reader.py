"""The version of a run's records, and the reader of their typed values."""

from frostlab.typed import check_numbers as check_numbers
from frostlab.typed import parse as parse
from frostlab.typed import read as read

SCHEMA = 2  # version of a run's records; records of another version are refused
