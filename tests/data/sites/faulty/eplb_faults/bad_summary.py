from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl
def eplb_register_backends():
    return BackendInfo("bad_summary", "two\nlines", API_VERSION, "a:B")
