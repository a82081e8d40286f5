"""Models whose weights are read later: layer by layer, or each process its shards."""
