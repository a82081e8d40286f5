"""One file to send to a colleague: what every head of a model does on a text."""
