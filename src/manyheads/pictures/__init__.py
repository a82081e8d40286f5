"""Plain arrays to PNG and SVG."""
