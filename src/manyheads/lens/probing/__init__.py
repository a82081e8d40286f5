"""Probes: what can be read linearly from activations and patterns."""
