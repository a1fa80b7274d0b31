from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl
def eplb_register_backends():
    return BackendInfo("future_field", "of the future", API_VERSION, "a:B", teleport=True)
