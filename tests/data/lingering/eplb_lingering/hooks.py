"""What the distribution offers."""

from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl
def eplb_register_backends():
    return BackendInfo(
        "lingering",
        "for the tests: moves rows through the store, and cannot stop a transfer",
        API_VERSION,
        "eplb_lingering.backend:Lingering",
        async_safe=True,
    )
