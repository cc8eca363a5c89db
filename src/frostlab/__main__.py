"""`python -m frostlab` is the command `frostlab`."""

from frostlab.cli.main import main

main()
