"""Head kinds: tests, criteria and thresholds."""
