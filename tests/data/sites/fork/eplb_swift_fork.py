from eplb_core import API_VERSION, BackendInfo, hookimpl
from eplb_core.backend import StagingInfo


@hookimpl
def eplb_register_backends():
    return BackendInfo(
        "swift", "claimed twice", API_VERSION, "eplb_swift_fork_backend:Swift", async_safe=True, device_types=("*",), auto_priority=900
    )


@hookimpl
def eplb_register_staging():
    return StagingInfo("swift_pool", "claimed twice too", API_VERSION, "eplb_swift_fork_backend:Pool")
