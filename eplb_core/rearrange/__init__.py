"""From begin() to a committed row. Internal; `eplb_core.Communicator` is its face."""
