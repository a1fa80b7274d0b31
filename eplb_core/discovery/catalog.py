"""The catalogue of what is installed: descriptors by name, plugins that were skipped, names in conflict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eplb_core.backend import BackendInfo, PolicyInfo, StagingInfo
from eplb_core.errors import DiscoveryError


@dataclass(frozen=True)
class Origin:
    """Where a name comes from.

    Parameters
    ----------
    entry_point : str
        Name of the entry point in the group ``eplb_core.plugins``.
    distribution, version : str
        As in the distribution's metadata.
    location : str
        Folder in which the metadata was found.
    """

    entry_point: str
    distribution: str
    version: str
    location: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}" + (f" (in {self.location})" if self.location else "")


@dataclass(frozen=True)
class Failure:
    """A plugin that was skipped.

    Parameters
    ----------
    entry_point : str
        Entry point of the plugin.
    distribution, version : str
        Distribution that installed it; empty for a name in ``EPLB_PLUGINS`` that nobody offers.
    reason : str
        Why it was skipped.
    error : DiscoveryError
        The same as an error; its ``__cause__`` is what the plugin raised, if it did.
    """

    entry_point: str
    distribution: str
    version: str
    reason: str
    error: DiscoveryError

    def __str__(self) -> str:
        owner = f" of {self.distribution} {self.version}" if self.distribution else ""
        return f"{self.entry_point}{owner}: {self.reason}"


@dataclass(frozen=True)
class Catalog:
    """What is installed; of each plugin only its hook module was imported.

    Parameters
    ----------
    backends, staging, policies : mapping of str to descriptor
        By name, names ascending. A name in conflict is not among them.
    failures : tuple of Failure
        Plugins that were skipped.
    conflicts : mapping of (kind, name) to tuple of Origin
        Names claimed by more than one distribution; kind is "backend", "staging" or "policy".
    origins : mapping of (kind, name) to Origin
        Where each usable name comes from.
    excluded : tuple of Origin
        Entry points that ``EPLB_PLUGINS`` leaves out; they were not loaded.
    """

    backends: Mapping[str, BackendInfo] = field(default_factory=dict)
    staging: Mapping[str, StagingInfo] = field(default_factory=dict)
    policies: Mapping[str, PolicyInfo] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    conflicts: Mapping[tuple[str, str], tuple[Origin, ...]] = field(default_factory=dict)
    origins: Mapping[tuple[str, str], Origin] = field(default_factory=dict)
    excluded: tuple[Origin, ...] = ()


def same_release(one: Origin, other: Origin) -> bool:
    """Are these of one version of one distribution?"""
    return (one.distribution, one.version) == (other.distribution, other.version)
