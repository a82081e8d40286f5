"""Models with integer weights on the CPU: eight or four bits, and what is lost by them."""
