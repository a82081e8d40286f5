"""Attribution of an answer to heads, layers and tokens."""
