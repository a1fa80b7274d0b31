"""One hook module behind two entry points: two backends, an allocator and a policy."""

from eplb_core import API_VERSION, BackendInfo, hookimpl
from eplb_core.backend import PolicyInfo, StagingInfo

eplb_register_count = 3  # no function, so no hook that lacks its decorator


@hookimpl
def eplb_register_backends():
    return [
        BackendInfo("heron", "wades", API_VERSION, "eplb_heron_backend:Heron"),
        BackendInfo("egret", "wades in white", API_VERSION, "eplb_heron_backend:Egret"),
    ]


@hookimpl
def eplb_register_staging():
    return [StagingInfo("heron_pool", "a pool", API_VERSION, "eplb_heron_pool:Pool")]


@hookimpl
def eplb_register_policies():
    return PolicyInfo("heron_greedy", "takes the nearest", API_VERSION, "eplb_heron_policy:rebalance")
