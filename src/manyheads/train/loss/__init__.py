"""Cross-entropy over a large vocabulary without holding all logits at once."""
