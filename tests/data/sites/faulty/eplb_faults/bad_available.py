from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl
def eplb_register_backends():
    return BackendInfo("bad_available", "faulty", API_VERSION, "eplb_faults_backend:Backend", available=True)
