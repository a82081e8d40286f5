"""Attention patterns on request, and what can be read from them."""
