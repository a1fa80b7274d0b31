from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl
def eplb_register_backend():
    return BackendInfo("misspelt", "faulty", API_VERSION, "eplb_faults_backend:Backend")
