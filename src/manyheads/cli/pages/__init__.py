"""What the commands print, imported only when there is something to print."""
