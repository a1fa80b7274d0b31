from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl
def eplb_register_backends():
    return BackendInfo("bad_async_safe", "faulty", API_VERSION, "eplb_faults_backend:Backend", async_safe="yes")
