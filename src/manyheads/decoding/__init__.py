"""Writing: prompts in, texts out, one token after another."""
