"""From a load to the placement that is to come: the policy's map, checked, aligned, and only where it is worth it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from eplb_core.arrays import IntArray
from eplb_core.balancing.alignment import align, assignment, rows_received
from eplb_core.balancing.arguments import FloatArray, count_replicas
from eplb_core.balancing.rank_load import balancedness
from eplb_core.discovery.discover import discover
from eplb_core.discovery.load import load_target
from eplb_core.discovery.select import resolve
from eplb_core.discovery.usable import why_unavailable
from eplb_core.errors import ConfigError, EplbError, PlanError
from eplb_core.errors.texts import describe

if TYPE_CHECKING:
    from eplb_core.config import EPLBConfig
    from eplb_core.discovery.catalog import Catalog


@dataclass(frozen=True)
class Policy:
    """A placement policy, imported.

    Parameters
    ----------
    name : str
        For messages.
    place : callable
        With the signature of `rebalance_experts`.
    worthwhile_gain : float or None
        See `PolicyInfo`.
    """

    name: str
    place: Callable[..., Any]
    worthwhile_gain: float | None


@dataclass(frozen=True)
class Group:
    """Where physical experts may be placed.

    Parameters
    ----------
    world_size : int
        Ranks that have columns in the map.
    members : tuple of int
        Ranks that take part, ascending; the columns of the others stay empty.
    nodes : tuple of int or None
        ``[world_size]``, the node of each rank; None is one node for all.
    num_expert_groups : int
        Groups of consecutive logical experts that the router picks from.
    draining : tuple of int
        Ranks that are about to leave: they get nothing, and keep what they have in layers that stay.
    """

    world_size: int
    members: tuple[int, ...]
    nodes: tuple[int, ...] | None = None
    num_expert_groups: int = 1
    draining: tuple[int, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Nodes, when the members are spread over them evenly and in order; else 1."""
        if self.nodes is None:
            return 1
        of_members = [self.nodes[rank] for rank in self.members]
        distinct = list(dict.fromkeys(of_members))
        per_node, rest = divmod(len(of_members), len(distinct))
        even = not rest and of_members == [node for node in distinct for _ in range(per_node)]
        return len(distinct) if even else 1


@dataclass(frozen=True, eq=False)
class NewPlacement:
    """What is to hold, and what coming there costs and gains.

    Parameters
    ----------
    physical_to_logical_map : IntArray
        int64 [num_layers, num_physical_experts]; the old row for layers that stay.
    balancedness_before, balancedness_after : float
        Mean over maximum of tokens per rank, averaged over the layers.
    num_moved_layers : int
        Layers that get another row.
    num_rows, num_rows_unaligned : int
        Rows that cross ranks, and how many would have crossed had slots kept the policy's numbers.
    """

    physical_to_logical_map: IntArray
    balancedness_before: float
    balancedness_after: float
    num_moved_layers: int
    num_rows: int
    num_rows_unaligned: int


def load_policy(config: EPLBConfig, catalog: Catalog | None = None) -> Policy:
    """Import the policy that a configuration names.

    Parameters
    ----------
    config : EPLBConfig
        ``policy`` is read.
    catalog : Catalog or None
        What is installed; None looks.

    Returns
    -------
    Policy

    Raises
    ------
    ConfigError
        EPLB-C012: it is not installed. EPLB-C015: it cannot be used on this machine, or is no function.
    DiscoveryError
        EPLB-D002: two distributions claim it. EPLB-D006: its function cannot be imported.
    """
    info = resolve(discover() if catalog is None else catalog, "policy", config.policy)
    reason = why_unavailable(info)
    if reason is not None:
        hint = f"To install: {info.install_hint}" if info.install_hint else ""
        raise ConfigError("EPLB-C015", problem=f"the policy {info.name!r} cannot be used here: {reason}", detail=hint)
    place = load_target(info.target)
    if not callable(place):
        problem = f"the policy {info.name!r} is {type(place).__name__} ({info.target}), not a function"
        raise ConfigError("EPLB-C015", problem=problem)
    assignment()  # what aligning needs is imported now, and not beside an engine that serves
    return Policy(info.name, place, info.worthwhile_gain)


def check_slots(config: EPLBConfig, num_logical_experts: object, num_physical_experts: int) -> int:
    """Compare the slots of the host's map with the configuration, and return the number of logical experts.

    Raises
    ------
    ConfigError
        EPLB-C015: they are not the logical experts and the redundant ones.
    """
    if isinstance(num_logical_experts, bool) or not isinstance(num_logical_experts, (int, np.integer)):
        raise ConfigError("EPLB-C015", problem=f"num_logical_experts={num_logical_experts!r} should be an integer")
    expected = int(num_logical_experts) + config.num_redundant_experts
    if num_logical_experts < 1 or num_physical_experts != expected:
        problem = (
            f"{num_logical_experts} logical experts and num_redundant_experts={config.num_redundant_experts} make "
            f"{expected} slots, and the physical_to_logical_map has {num_physical_experts}"
        )
        raise ConfigError("EPLB-C015", problem=problem)
    return int(num_logical_experts)


def new_placement(policy: Policy, load: FloatArray, old: IntArray, group: Group) -> NewPlacement:
    """Ask the policy where experts should live, and keep what need not move.

    Parameters
    ----------
    policy : Policy
        Asked with the members' slots.
    load : FloatArray
        float64 [num_layers, num_logical_experts], of all ranks.
    old : IntArray
        int64 [num_layers, num_physical_experts], what holds.
    group : Group
        The ranks that take part, and their hosts.

    Returns
    -------
    NewPlacement

    Raises
    ------
    PlanError
        EPLB-P006: the sizes or the load allow no placement, or the policy returned none.
    """
    members, num_layers = len(group.members), len(old)
    columns = _columns(group.world_size, group.members, old.shape[1])
    before = old[:, columns]
    wanted = _asked(policy, load, before.shape, members, group)
    after = align(before, wanted, members, num_nodes=group.num_nodes)
    held = balancedness(load, before, members)
    gained = balancedness(load, after, members) - held
    changes = (after != before).any(axis=1)
    # An expert that no slot holds cannot be served however well the rest is balanced.
    lacking = (count_replicas(before, load.shape[1]) == 0).any(axis=1)
    if policy.worthwhile_gain is not None:
        changes &= (gained >= policy.worthwhile_gain) | lacking
    after[~changes] = before[~changes]
    new = np.full_like(old, -1)
    new[:, columns] = after
    kept = _columns(group.world_size, group.draining, old.shape[1])
    new[np.ix_(~changes, kept)] = old[np.ix_(~changes, kept)]  # whose experts have other rows as well
    moved = np.flatnonzero(changes)
    return NewPlacement(
        physical_to_logical_map=new,
        balancedness_before=float(held.mean()) if num_layers else 1.0,
        balancedness_after=float((held + np.where(changes, gained, 0.0)).mean()) if num_layers else 1.0,
        num_moved_layers=len(moved),
        num_rows=int(rows_received(before[moved], after[moved], members).sum()),
        num_rows_unaligned=int(rows_received(before[moved], wanted[moved], members).sum()),
    )


def _columns(world_size: int, ranks: Sequence[int], num_physical_experts: int) -> IntArray:
    local = num_physical_experts // world_size
    columns: IntArray = (np.array(ranks, dtype=np.int64)[:, None] * local + np.arange(local)).ravel()
    return columns


def _asked(policy: Policy, load: FloatArray, shape: Sequence[int], num_ranks: int, group: Group) -> IntArray:
    try:
        answer = policy.place(
            load.copy(),  # which is its own to change: what is gained is reckoned from the load that was recorded
            shape[1],
            num_ranks=num_ranks,
            num_groups=group.num_expert_groups,
            num_nodes=group.num_nodes,
        )
        wanted = np.array(answer)
    except EplbError:
        raise
    except (Exception, SystemExit) as error:  # one that exits would take the worker with it, on this rank alone
        problem = f"the policy {policy.name!r} failed with {describe(error)}"
        raise PlanError("EPLB-P006", problem=problem) from error
    problem = ""
    if wanted.shape != tuple(shape) or wanted.dtype.kind not in "iu":
        problem = f"{wanted.dtype} {list(wanted.shape)} where integers {list(shape)} were expected"
    elif wanted.size and not -1 <= wanted.min() <= wanted.max() < load.shape[1]:
        problem = f"experts {wanted.min()} to {wanted.max()}, and there are {load.shape[1]}"
    else:
        wanted = wanted.astype(np.int64)
        missing = np.argwhere(count_replicas(wanted, load.shape[1]) == 0)
        if len(missing):
            problem = f"a placement without expert {missing[0][1]} in layer {missing[0][0]}"
    if problem:
        raise PlanError("EPLB-P006", problem=f"the policy {policy.name!r} returned {problem}")
    return wanted
