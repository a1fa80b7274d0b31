from eplb_core import API_VERSION, BackendInfo, hookimpl


@hookimpl
def eplb_register_backends():
    return BackendInfo("bad_device_types", "faulty", API_VERSION, "eplb_faults_backend:Backend", device_types=["cpu"])
