"""One HTML file about what every head of a model does on a text or an image."""
