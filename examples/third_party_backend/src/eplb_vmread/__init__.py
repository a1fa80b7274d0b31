"""Single-copy transfers between processes of one host."""
