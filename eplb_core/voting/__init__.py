"""How the members of an epoch decide, and who is alive. Internal."""
