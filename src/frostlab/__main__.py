"""Entry point of `python -m frostlab`, which runs the command `frostlab`."""

from frostlab.cli.main import main

main()
