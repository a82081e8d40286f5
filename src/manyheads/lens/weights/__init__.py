"""What the weights alone say: circuits, composition, feed-forward key-values, neurons."""
