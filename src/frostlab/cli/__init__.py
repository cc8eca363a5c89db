"""The commands of `frostlab`: thin, and importing torch only where a command needs it."""
