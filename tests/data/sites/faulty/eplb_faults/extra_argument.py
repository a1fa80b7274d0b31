from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl
def eplb_register_backends(device):
    return BackendInfo("extra_argument", "faulty", API_VERSION, "eplb_faults_backend:Backend")
