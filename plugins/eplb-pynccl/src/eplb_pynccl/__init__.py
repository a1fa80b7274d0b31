"""The ``pynccl`` backend of eplb-core: expert weights over NCCL's own send and receive, without torch.distributed.

Nothing is imported here: `eplb_pynccl.hooks` declares the backend, `eplb_pynccl.backend` is loaded when it is chosen.
"""

__version__ = "0.1.0"
