"""Commands about how heads work together."""
