"""Mixers that look back at kept keys and values of a bounded number of earlier tokens."""
