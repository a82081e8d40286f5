"""A web page that shows what every head of a model does with a text that you type."""
