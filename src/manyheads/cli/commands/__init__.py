"""One file per command, imported without torch."""
