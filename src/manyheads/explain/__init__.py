"""A sentence walked through one attention layer, and why scores are divided by sqrt(d)."""
