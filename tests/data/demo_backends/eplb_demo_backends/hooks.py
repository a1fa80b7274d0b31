"""What the distribution offers."""

from eplb_core import API_VERSION, BackendInfo, hookimpl

_CLASSES = {
    "through_store": "ThroughStore",
    "flips_a_byte": "FlipsAByte",
    "kills_a_rank": "KillsARank",
    "raises": "Raises",
    "hangs": "Hangs",
}


@hookimpl
def eplb_register_backends():
    return [
        BackendInfo(
            name,
            f"for the demo's tests: {name}",
            API_VERSION,
            f"eplb_demo_backends.backend:{cls}",
            async_safe=True,
        )
        for name, cls in _CLASSES.items()
    ]
