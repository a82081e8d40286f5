"""Standard scores: benchmarks of lm-evaluation-harness and long-context recall, by head."""
