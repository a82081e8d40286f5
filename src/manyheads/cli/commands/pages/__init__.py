"""Commands that write pages to look at."""
