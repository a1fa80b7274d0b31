"""Ranks as processes on loopback, started, heard and ended by one launcher. Internal: use `eplb_core.testing`."""
