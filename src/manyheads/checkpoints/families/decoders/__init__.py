"""Decoders: families that generate text."""
