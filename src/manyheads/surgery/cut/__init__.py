"""A smaller model from the heads, neurons and layers that stay."""
