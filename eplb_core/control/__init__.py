"""The store all ranks reach, and who is where. Internal."""
