"""Low-rank adapters, the four-bit weights below them, and their files."""
