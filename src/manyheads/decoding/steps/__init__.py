"""One decoding step, token ids in and next-token logits out, and the fast ways to compute it."""
