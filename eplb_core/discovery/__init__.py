"""Which plugins there are, and which is taken. Internal; `eplb_core.discover` and `eplb_core.select` are its face."""
