"""The page a person opens in a browser: type a text and see what every head does with it."""
