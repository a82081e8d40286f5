"""Models to folders and back: safetensors, config.json, tokenizer.json."""
