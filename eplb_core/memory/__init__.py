"""Landing and staging memory, and the copies out of it. Internal."""
