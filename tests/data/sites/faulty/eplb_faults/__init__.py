"""One module per fault of a plugin."""
