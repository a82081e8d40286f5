"""Encoders: families that read text in both directions."""
