from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl
def eplb_register_backends():
    return BackendInfo(
        name="pigeon",
        summary="carries rows by pigeon",
        api_version=API_VERSION,
        target="eplb_pigeon.backend:PigeonBackend",
        options="eplb_pigeon.backend:PigeonOptions",
        async_safe=True,
        device_types=("*",),
        auto_priority=10,
    )
