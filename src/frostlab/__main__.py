"""`python -m frostlab` is the command `frostlab`."""

from frostlab.cli import main

main()
