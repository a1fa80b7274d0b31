"""The pynccl backend, declared for CPU tensors, over the stub libnccl that the environment names."""
