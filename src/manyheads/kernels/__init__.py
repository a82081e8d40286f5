"""Ways to compute attention that all give the reference's answer."""
