"""The ``torch_nccl`` backend of eplb-core: expert weights over the host's device group, point to point.

Nothing is imported here: `eplb_nccl.hooks` declares the backend, `eplb_nccl.backend` is loaded when it is chosen.
"""

__version__ = "0.1.0"
