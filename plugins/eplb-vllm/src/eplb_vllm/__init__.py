"""vLLM moves its expert weights with eplb-core.

vLLM calls `register` in every process, through the entry point ``vllm.general_plugins``. Nothing else is imported here.
"""

__version__ = "0.1.0"


def register() -> None:
    """Have vLLM's EPLB code patched as soon as it is imported, or now if it is; calling it again changes nothing.

    Imports neither torch, nor vLLM, nor eplb-core.
    """
    from eplb_vllm.hook import install

    install()
