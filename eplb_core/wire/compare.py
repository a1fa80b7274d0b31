"""The comparison of two ranks' records: the first difference, as a typed error."""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from eplb_core.errors import MetadataError
from eplb_core.weights.tensor import Key, TensorRecord

if TYPE_CHECKING:  # metadata offers `difference` as its own
    from eplb_core.wire.record import RankRecord

_MAX_SHOWN = 64
"""Most keys listed in a message, and most on each side of a difference."""

_IDENTITY = {
    "eplb-core version": attrgetter("core_version"),
    "API version": attrgetter("api_version"),
    "backend": attrgetter("backend"),
    "backend version": attrgetter("backend_version"),
    "members": attrgetter("members"),
}
# Ordered: later fields have a meaning only if the earlier ones are equal.
_OF_A_TENSOR = {
    "nbytes_per_expert": attrgetter("nbytes"),
    "dtype": attrgetter("dtype"),
    "shape": attrgetter("shape"),
    "stride": attrgetter("stride"),
    "alias": attrgetter("alias"),
}


def difference(local: RankRecord, peer: RankRecord) -> MetadataError | None:
    """Return the first difference between two ranks' records as an error, or None.

    Notes
    -----
    Earlier differences explain later ones, hence the order: versions of core and contract, backend, its version,
    members (EPLB-M004); keys (EPLB-M002); experts per rank (EPLB-M004); bytes per expert (EPLB-M003); dtype, shape,
    stride and aliases of a tensor, shared options (EPLB-M004).
    """
    for name, value in _IDENTITY.items():
        if value(local) != value(peer):
            return _mismatch(local, peer, name, value(local), value(peer))
    if local.layout.names != peer.layout.names:
        return _of_keys(local, peer)
    return _of_experts(local, peer) or _of_tensors(local, peer) or _of_options(local, peer)


def _mismatch(
    local: RankRecord, peer: RankRecord, name: str, mine: object, theirs: object, detail: str = ""
) -> MetadataError:
    return MetadataError(
        "EPLB-M004", label=local.label, field=name, peer=peer.rank, local=mine, remote=theirs, detail=detail
    )


def _of_experts(local: RankRecord, peer: RankRecord) -> MetadataError | None:
    pairs = list(zip(local.layout.num_experts, peer.layout.num_experts, strict=True))
    differing = [layer for layer, (mine, theirs) in enumerate(pairs) if mine != theirs]
    if not differing:
        return None
    others = f" Likewise {len(differing) - 1} more layer(s)." if differing[1:] else ""
    detail = f"in layer {differing[0]}.{others}"
    return _mismatch(local, peer, "num_local_physical_experts", *pairs[differing[0]], detail)


def _of_keys(local: RankRecord, peer: RankRecord) -> MetadataError:
    mine, theirs = (
        [(layer, name) for layer, names in enumerate(record.layout.names) for name in names] for record in (local, peer)
    )
    missing_here = sorted(set(theirs).difference(mine))
    missing_there = sorted(set(mine).difference(theirs))
    parts = []
    if missing_here:
        parts.append(f"Missing on rank {local.rank}: {_listing(missing_here)}.")
    if missing_there:
        parts.append(f"Missing on rank {peer.rank}: {_listing(missing_there)}.")
    if not parts:
        # Messages carry a tensor's index, so the order counts.
        at = next(i for i, (ours, other) in enumerate(zip(mine, theirs, strict=True)) if ours != other)
        parts.append(f"The keys are equal, their order is not: first {mine[at]} here where the peer has {theirs[at]}.")
    return MetadataError(
        "EPLB-M002",
        label=local.label,
        peer=peer.rank,
        local=_listing(sorted(mine)),
        remote=_listing(sorted(theirs)),
        detail=" ".join(parts),
    )


def _of_tensors(local: RankRecord, peer: RankRecord) -> MetadataError | None:
    pairs: list[tuple[Key, TensorRecord, TensorRecord]] = [
        ((layer, name), mine, theirs)
        for layer, names in enumerate(local.layout.names)
        if local.layout.tensors[layer] != peer.layout.tensors[layer]
        for name, mine, theirs in zip(names, local.layout.tensors[layer], peer.layout.tensors[layer], strict=True)
    ]
    for name, value in _OF_A_TENSOR.items():
        differing = [pair for pair in pairs if value(pair[1]) != value(pair[2])]
        if not differing:
            continue
        key, mine, theirs = differing[0]
        tensors = f"One expert is {_described(mine)} here, {_described(theirs)} on rank {peer.rank}."
        others = f" Likewise {_listing([pair[0] for pair in differing[1:]])}." if differing[1:] else ""
        if name == "nbytes_per_expert":
            return MetadataError(
                "EPLB-M003",
                label=local.label,
                key=key,
                peer=peer.rank,
                local=mine.nbytes,
                remote=theirs.nbytes,
                detail=tensors + others,
            )
        return _mismatch(local, peer, name, value(mine), value(theirs), f"for {key}. {tensors}{others}")
    return None


def _of_options(local: RankRecord, peer: RankRecord) -> MetadataError | None:
    exact: Callable[[Any], object] = lambda value: (type(value), repr(value))  # noqa: E731 - 1, 1.0 and True differ
    names = [
        name
        for name in sorted(local.options.keys() | peer.options.keys())
        if exact(local.options.get(name)) != exact(peer.options.get(name))  # no option has the value None
    ]
    if not names:
        return None
    mine, theirs = (
        {name: record.options[name] for name in names if name in record.options} for record in (local, peer)
    )
    return _mismatch(local, peer, "options", mine, theirs, "(only those that differ).")


def _described(tensor: TensorRecord) -> str:
    alias = f", the same memory as tensor {tensor.alias} of its layer" if tensor.alias >= 0 else ""
    return f"{tensor.dtype} {tensor.shape} with strides {tensor.stride}{alias}"


def _listing(keys: Collection[Key]) -> str:
    shown = ", ".join(repr(key) for key, _ in zip(keys, range(_MAX_SHOWN), strict=False))
    return f"[{shown}]" if len(keys) <= _MAX_SHOWN else f"[{shown}, ... {len(keys) - _MAX_SHOWN} more]"
