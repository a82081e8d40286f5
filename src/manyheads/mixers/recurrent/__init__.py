"""Mixers that carry a state from token to token, and the recurrences they run on."""
