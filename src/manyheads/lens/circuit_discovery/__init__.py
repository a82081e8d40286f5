"""Which parts of a model work together, along which edges, and how to prove it."""
