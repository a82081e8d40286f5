"""Sources of texts: plain files, rows of .jsonl and .parquet files, datasets of the hub."""
