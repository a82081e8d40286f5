"""Short training of a whole model or of some of its parts."""
