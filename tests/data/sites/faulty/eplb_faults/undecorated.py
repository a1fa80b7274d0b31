from eplb_core import API_VERSION, BackendInfo


def eplb_register_backends():
    return BackendInfo("undecorated", "faulty", API_VERSION, "eplb_faults_backend:Backend")
