"""What can replace softmax attention in a layer: recurrences whose state has a fixed size."""
