"""Which heads, neurons and layers can be removed, and what it costs."""
