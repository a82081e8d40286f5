"""Commands that measure: studies of published claims, and shapes of models."""
