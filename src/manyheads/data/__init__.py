"""Text and images to ragged batches: read, tokenise, store, pack, mask."""
