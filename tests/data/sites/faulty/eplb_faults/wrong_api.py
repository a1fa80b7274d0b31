from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl
def eplb_register_backends():
    return BackendInfo("wrong_api", "of the future", 99, "not a target")
