"""The commands; thin. torch is imported only by the commands that need it."""
