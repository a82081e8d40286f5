"""One command a file, no logic."""
