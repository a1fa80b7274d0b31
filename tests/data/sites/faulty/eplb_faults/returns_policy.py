from eplb_core import API_VERSION, BackendInfo, hookimpl
from eplb_core.backend import PolicyInfo


@hookimpl
def eplb_register_backends():
    return PolicyInfo("returns_policy", "of another kind", API_VERSION, "a:b")
