"""A successor: the same communicator over another group, built beside the one that serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eplb_core.control.plane import ControlPlane
from eplb_core.discovery.usable import why_not_elastic
from eplb_core.errors import ConfigError, MetadataError
from eplb_core.plan.translation import checked_mapping
from eplb_core.voting.roll import Post, post_key
from eplb_core.wire.envelope import MessageScope

if TYPE_CHECKING:
    from eplb_core.rearrange.lives import Lives
    from eplb_core.rearrange.setup import Setup

_POST_NBYTES = 1 << 20


def check_succession(lives: Lives, setup: Setup, control: object, rank_mapping: object) -> dict[int, int]:
    """Refuse a control plane or a mapping that cannot be a successor's; local.

    Returns
    -------
    dict of int to int
        Old rank to new rank.

    Raises
    ------
    ConfigError
        The backend is not elastic_safe (EPLB-C005), or an argument does not fit (EPLB-C010).
    PlanError
        The mapping is none (EPLB-P001).
    """
    reason = why_not_elastic(setup.info)
    if reason is not None:
        detail = "EPLBConfig(elastic=True) chooses a backend whose communicator may get a successor."
        raise ConfigError("EPLB-C005", communicator=setup.info.name, reason=reason, detail=detail)
    if not isinstance(control, ControlPlane):
        raise ConfigError("EPLB-C010", problem=f"control= should be ControlPlane, got {type(control).__name__}")
    mapping = checked_mapping(rank_mapping)
    problem = ""
    if len(mapping) != lives.control.world_size:
        problem = f"rank_mapping is for {len(mapping)} ranks, and the communicator has {lives.control.world_size}"
    elif mapping[lives.rank] != control.rank:
        problem = f"rank_mapping makes rank {lives.rank} rank {mapping[lives.rank]}, and control= says {control.rank}"
    elif max(mapping.values()) >= control.world_size:
        problem = f"rank_mapping names rank {max(mapping.values())} in a group of {control.world_size}"
    elif _is_over_the_same_store(lives, setup, control):
        problem = "control= is over the store of the communicator that it succeeds; give it a PrefixStore of its own"
    if problem:
        raise ConfigError("EPLB-C010", problem=problem)
    return mapping


def _is_over_the_same_store(lives: Lives, setup: Setup, control: ControlPlane) -> bool:
    if control is lives.control:
        return True
    client = control.client(f"eplb/{setup.name}", float(setup.config.timeout_s))
    try:
        value = client.read(post_key(lives.rank))
    finally:
        client.close()
    if value is None:
        return False
    try:
        post = Post.from_bytes(MessageScope(setup.name, lives.rank, 0, 0).unseal(value, "post", _POST_NBYTES))
    except (MetadataError, KeyError, ValueError, TypeError):
        return False
    return lives.is_mine(post.process)


def arguments_of(setup: Setup) -> dict[str, Any]:
    """Return what a successor is built with as the one before was."""
    names = [list(layer) for layer in setup.layout.shared.names]
    return {
        "config": setup.config,
        "weights": [list(layer) for layer in setup.layout.weights],
        "options": setup.options,
        "tensor_names": names or None,
        "name": setup.name,
        "sources": setup.sources,
    }
