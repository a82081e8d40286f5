"""An index on disk: rows with vectors, keywords, and the manifest that commits them."""
