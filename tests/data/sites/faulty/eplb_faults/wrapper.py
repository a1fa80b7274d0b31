from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl(wrapper=True)
def eplb_register_backends():
    return (yield)
