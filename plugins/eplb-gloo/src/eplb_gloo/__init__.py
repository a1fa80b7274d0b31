"""The ``torch_gloo`` backend of eplb-core: expert weights over gloo, point to point.

Nothing is imported here: `eplb_gloo.hooks` declares the backend, `eplb_gloo.backend` is loaded when it is chosen.
"""

__version__ = "0.1.0"
