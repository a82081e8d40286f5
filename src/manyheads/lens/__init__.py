"""Look: what the heads of a model do."""
