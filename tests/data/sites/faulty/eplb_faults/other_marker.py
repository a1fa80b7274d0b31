import pluggy

from eplb_core import API_VERSION, BackendInfo

hookimpl = pluggy.HookimplMarker("another_project")


@hookimpl
def eplb_register_backends():
    return BackendInfo("other_marker", "faulty", API_VERSION, "eplb_faults_backend:Backend")
