"""The run file: TOML to frozen configs, checked before any work."""
