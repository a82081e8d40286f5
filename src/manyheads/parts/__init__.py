"""The values a layer is made of."""
