from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl
def eplb_register_backends():
    return BackendInfo("bad_priority", "faulty", API_VERSION, "eplb_faults_backend:Backend", auto_priority=-1)
