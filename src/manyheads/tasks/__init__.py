"""Put encoders to work: search documents, find entities, classify and filter corpora."""
