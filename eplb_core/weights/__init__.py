"""What is registered: tensors seen as rows of bytes. Internal."""
