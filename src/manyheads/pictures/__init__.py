"""Plain arrays to PNG."""
