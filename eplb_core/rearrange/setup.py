"""What a communicator is made of: the chosen backend's class and options, the staging allocator, the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ValidationError

from eplb_core.backend import BackendInfo, StagingAllocator
from eplb_core.config import EPLBConfig
from eplb_core.control.plane import ControlPlane
from eplb_core.discovery.catalog import Catalog
from eplb_core.discovery.discover import discover
from eplb_core.discovery.load import load_target
from eplb_core.discovery.select import resolve, select
from eplb_core.discovery.select_staging import build_allocator
from eplb_core.errors import ConfigError, DiscoveryError, EplbError
from eplb_core.errors.texts import describe
from eplb_core.memory.staging import TorchStaging
from eplb_core.memory.streams import Streams
from eplb_core.rearrange.idle import IdleBackend
from eplb_core.sources.provider import SourceProvider
from eplb_core.weights.host_landing import take_landing
from eplb_core.weights.layout import Layout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Setup:
    """What all epochs of a communicator share; fixed when the communicator is built.

    Parameters
    ----------
    name : str
        Name of the communicator.
    config : EPLBConfig
        Configuration that the host gave.
    info : BackendInfo
        Declaration of the chosen backend.
    backend_class : type
        Loaded from ``info.target``.
    backend_version : str
        Version of the distribution that offers it.
    options : object
        The backend's options model, checked.
    layout : Layout
        Registered tensors.
    streams : Streams
        Streams and events of the weights' device.
    allocator : StagingAllocator
        For landing memory and send staging.
    observers : sequence of object
        Observers that the host gave.
    sources : sequence of SourceProvider
        Sources that the host gave.
    """

    name: str
    config: EPLBConfig
    info: BackendInfo
    backend_class: Any
    backend_version: str
    options: Any
    layout: Layout
    streams: Streams
    allocator: StagingAllocator
    observers: Sequence[object]
    sources: Sequence[SourceProvider] = ()

    def take_landing(self, given: Any) -> list[list[torch.Tensor]] | None:
        """Return a host's own landing rows, checked; see `eplb_core.weights.host_landing.take_landing`."""
        return take_landing(
            given,
            self.layout,
            name=self.name,
            backend=self.info.name,
            landing_layout=self.backend_class.landing_layout,
            staging_layers=self.config.staging_layers,
        )

    @property
    def label(self) -> str:
        """Leading word of the backend's errors."""
        return self.info.label or self.info.name


def check_arguments(config: object, control: object, observers: object, name: object) -> None:
    """Refuse arguments of `Communicator` that have the wrong type (EPLB-C010)."""
    for what, value, kind in (("config", config, EPLBConfig), ("control", control, ControlPlane), ("name", name, str)):
        if not isinstance(value, kind):
            problem = f"{what}= should be {kind.__name__}, got {type(value).__name__}"
            raise ConfigError("EPLB-C010", problem=problem)
    if isinstance(observers, (str, bytes)) or not isinstance(observers, Sequence):
        problem = f"observers= should be a sequence of observers, got {type(observers).__name__}"
        raise ConfigError("EPLB-C010", problem=problem)


def set_up(
    config: EPLBConfig,
    layout: Layout,
    *,
    stream: Any,
    options: Mapping[str, Any] | BaseModel | None,
    observers: Sequence[object],
    name: str,
    sources: Sequence[SourceProvider] = (),
) -> Setup:
    """Choose the backend, check its options, load its class, probe it, and build the staging allocator.

    Parameters
    ----------
    config, stream, options, observers, name, sources
        See `Communicator`.
    layout : Layout
        The registered tensors.

    Returns
    -------
    Setup

    Raises
    ------
    ConfigError
        No backend fits, or its options do not, or the staging allocator does not, or the policy is not installed.
    DiscoveryError
        The chosen backend cannot be loaded, or fails its probe; no other is taken instead.
    """
    catalog = discover()
    if config.policy != "default":  # which is the core's own, eplb_core.balancing
        resolve(catalog, "policy", config.policy)
    if not layout.num_layers:
        return _set_up_idle(config, layout, catalog, options=options, observers=observers, name=name)
    info = select(config, device_type=layout.device.type, catalog=catalog).info
    checked = _check_options(info, options)
    cls: Any = load_target(info.target)
    if getattr(cls, "landing_layout", None) not in ("rows", "packed_by_peer"):
        reason = f"{info.target} must declare landing_layout as 'rows' or 'packed_by_peer'"
        raise DiscoveryError("EPLB-D003", backend=info.name, reason=reason)
    if info.landing_layout not in (None, cls.landing_layout):
        reason = f"its entry declares landing_layout={info.landing_layout!r}, {info.target} {cls.landing_layout!r}"
        raise DiscoveryError("EPLB-D003", backend=info.name, reason=reason)
    if getattr(cls, "landing_device", None) not in ("weights", "host"):
        reason = f"{info.target} must declare landing_device as 'weights' or 'host'"
        raise DiscoveryError("EPLB-D003", backend=info.name, reason=reason)
    if layout.has_row_lists and not getattr(cls, "row_lists", False):
        problem = f"weights= holds lists with a tensor per expert, which {info.name} does not take"
        raise ConfigError("EPLB-C010", problem=problem)
    if hasattr(cls, "probe"):
        try:
            cls.probe(checked)
        except EplbError:
            raise
        except Exception as error:
            reason = describe(error)
            raise DiscoveryError("EPLB-D004", backend=info.name, reason=reason, detail=info.install_hint) from error
    return Setup(
        name=name,
        config=config,
        info=info,
        backend_class=cls,
        backend_version=catalog.origins["backend", info.name].version,
        options=checked,
        layout=layout,
        streams=Streams(layout.device, stream, float(config.timeout_s)),
        allocator=build_allocator(
            config, catalog, weights=layout.device, landing_device=cls.landing_device, backend=info.name
        ),
        observers=tuple(observers),
        sources=tuple(sources),
    )


def _set_up_idle(
    config: EPLBConfig,
    layout: Layout,
    catalog: Catalog,
    *,
    options: Mapping[str, Any] | BaseModel | None,
    observers: Sequence[object],
    name: str,
) -> Setup:
    """Set up a stage without layers: what the configuration says is checked as everywhere, and nothing is loaded."""
    named = None if config.communicator is None else resolve(catalog, "backend", config.communicator)
    device_type = "cpu" if named is None or {"*", "cpu"} & set(named.device_types) else named.device_types[0]
    info = select(config, device_type=device_type, catalog=catalog).info
    return Setup(
        name=name,
        config=config,
        info=info,
        backend_class=IdleBackend,
        backend_version=catalog.origins["backend", info.name].version,
        options=_check_options(info, options),
        layout=layout,
        streams=Streams(layout.device, None, float(config.timeout_s)),
        allocator=TorchStaging(layout.device),
        observers=tuple(observers),
    )


def _check_options(info: BackendInfo, options: Mapping[str, Any] | BaseModel | None) -> BaseModel | None:
    given: object = options
    if given is not None and not isinstance(given, (Mapping, BaseModel)):
        problem = f"expected a mapping or an options model, got {type(given).__name__}"
        raise ConfigError("EPLB-C008", backend=info.name, problem=problem)
    model: Any = load_target(info.options) if isinstance(info.options, str) else info.options
    if model is None:
        if options:
            raise ConfigError("EPLB-C008", backend=info.name, problem="it takes no options")
        return None
    if isinstance(options, model):
        return cast("BaseModel", options)
    if isinstance(options, BaseModel):
        problem = f"expected {model.__name__}, got {type(options).__name__}"
        raise ConfigError("EPLB-C008", backend=info.name, problem=problem)
    try:
        return cast("BaseModel", model(**{str(key): value for key, value in (options or {}).items()}))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError("EPLB-C008", backend=info.name, problem=problems) from error
