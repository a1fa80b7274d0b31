"""What is sent between ranks, and how it is checked. Internal."""
