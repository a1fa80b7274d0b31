"""A backend that never knows whether what it was told to stop has stopped."""
