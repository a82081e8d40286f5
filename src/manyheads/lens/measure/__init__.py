"""Statistics of heads in one exact streaming pass, without the n x n pattern."""
