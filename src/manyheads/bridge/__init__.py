"""The bridge: models of `transformers`, unconverted, under the lens."""
