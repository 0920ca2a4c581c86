"""One file per extension point: components that a config names."""
