from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl
def eplb_register_backends():
    raise OSError("libmissing.so.7:\n  cannot open shared object file.")
