"""What a model reads while it is measured: texts, batches, annotated and synthetic data."""
