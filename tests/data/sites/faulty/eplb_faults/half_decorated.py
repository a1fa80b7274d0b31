from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl
def eplb_register_backends():
    return BackendInfo("half_decorated", "faulty", API_VERSION, "eplb_faults_backend:Backend")


def eplb_register_staging():
    return []
