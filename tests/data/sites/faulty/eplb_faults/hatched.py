from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl
def eplb_register_backends():
    return BackendInfo("hatched", "sound, but behind two entry points", API_VERSION, "eplb_faults_backend:Backend")
