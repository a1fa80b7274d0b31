"""The communicator that vLLM holds for a model: eplb-core's, built over the model's expert weights."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.distributed.eplb.eplb_communicator import EplbCommunicator
from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip

import eplb_core as eplb
from eplb_core.errors import ConfigError
from eplb_core.observers import Stats
from eplb_vllm.mover import Mover
from eplb_vllm.names import tensor_names
from eplb_vllm.settings import Settings

logger = init_logger("vllm.plugins.eplb_vllm")

Tensors = Sequence[torch.Tensor]

_UNKNOWN_ADDRESS = "0.0.0.0"
"""What vLLM says when it knows none."""

_JOINING_S = 600.0
"""Limit of making a control plane: a rank that joins an elastic group loads its model first."""


class _Planes:
    """One control plane for each group of vLLM's, and how many communicators were built on it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def take(self, coordinator: Any, settings: Settings) -> tuple[Any, str]:
        """Return a group's control plane and the next name on it; collective for the first name."""
        with self._lock:
            entry = self._known.get(coordinator)
            if entry is None:
                host = settings.host or get_ip()
                control = eplb.ControlPlane.from_process_group(
                    coordinator.cpu_group,
                    host=None if host == _UNKNOWN_ADDRESS else host,
                    timeout_s=max(_JOINING_S, float(settings.config.timeout_s)),
                )
                entry = self._known[coordinator] = [control, 0]
            control, number = entry
            entry[1] += 1
            return control, f"vllm-{number}"


_planes = _Planes()


class CoreCommunicator(EplbCommunicator):
    """Stands in for vLLM's communicator; the patched functions use its `mover`.

    Parameters
    ----------
    coordinator : GroupCoordinator
        vLLM's group; its CPU group is used once, to make a control plane.
    settings : Settings
        What the user asked for.
    expert_weights : sequence of sequence of torch.Tensor
        ``[num_moe_layers][num_tensors]``.
    expert_buffer : sequence of torch.Tensor
        ``[num_tensors]``, shaped like the first layer.
    layers : iterable of torch.nn.Module
        Layers whose parameters the weights may be, for their names.

    Raises
    ------
    ConfigError, DiscoveryError, MetadataError
        Settings or weights do not fit; see `eplb_core.Communicator`.
    """

    def __init__(
        self,
        coordinator: Any,
        settings: Settings,
        expert_weights: Sequence[Tensors],
        expert_buffer: Tensors,
        layers: Iterable[Any] = (),
    ) -> None:
        if not expert_weights or not expert_weights[0]:
            raise ConfigError("EPLB-C010", problem="vLLM's model has no expert weights")
        choice = eplb.select(settings.config, device_type=expert_weights[0][0].device.type)
        config, landing = _landing(settings, choice.info, expert_weights, expert_buffer)
        control, name = _planes.take(coordinator, settings)
        self.stats = Stats()
        self.on_failure = config.on_failure
        comm = eplb.Communicator(
            config,
            expert_weights,
            control,
            device_group=coordinator.device_group,
            options=settings.options,
            observers=[self.stats],
            landing=None if landing is None else ("if possible", landing),
            tensor_names=tensor_names(expert_weights, layers),
            name=name,
        )
        self.mover = Mover(
            comm,
            expert_weights,
            lambda: None if landing is None else [[torch.empty_like(t) for t in slot] for slot in landing],
        )
        self._exporter = _exporter()
        if control.rank == 0:
            logger.info(
                "eplb-vllm: %s moves the expert weights of %d layers over %d ranks with %s (%s); rows land in %s;"
                " a failed rearrangement %s",
                name,
                len(expert_weights),
                control.world_size,
                comm.backend,
                choice.reasons.get(comm.backend, "chosen"),
                "vLLM's expert buffer" if landing else f"{config.staging_layers} layer(s) of the core's own memory",
                "is dropped" if self.on_failure == "keep" else "stops the engine",
            )

    # --- what vLLM asks of a communicator ----------------------------------------------------------------------------

    def add_send(self, tensors: list[torch.Tensor], dst_rank: int, expert_id: int) -> None:
        """Refuse: rows are not sent one by one."""
        raise self._not_this_way("add_send")

    def add_recv(self, tensors: list[torch.Tensor], src_rank: int, expert_id: int) -> None:
        """Refuse: rows are not received one by one."""
        raise self._not_this_way("add_recv")

    def execute(self) -> None:
        """Refuse: nothing was added."""
        raise self._not_this_way("execute")

    @property
    def needs_profile_buffer_reservation(self) -> bool:
        """No: landing memory is allocated when the model is loaded, where vLLM's profile sees it."""
        return False

    def set_stream(self, stream: torch.Stream | None) -> None:
        """Ignore it: the core has a stream of its own, and waits for the one that is current at begin."""

    def _not_this_way(self, method: str) -> RuntimeError:
        return RuntimeError(
            f"eplb-vllm: {method}() was called, but with additional_config['eplb_core'] whole layers move, through"
            " the patched transfer_layer and rearrange_expert_weights_inplace"
        )

    # --- of our own --------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Bring the exported counters up to date."""
        if self._exporter is not None:
            self._exporter.publish(self.mover.comm.name, self.stats)

    def failed(self, error: Exception, what: str) -> None:
        """Say that a rearrangement was given up, or stop the engine where that was asked for or nothing else is left.

        Parameters
        ----------
        error : Exception
            What ended it.
        what : str
            Sentence of the log that says which placement holds, and what comes next.
        """
        self.publish()
        if self.on_failure == "raise" or self.mover.is_final(error):
            raise error
        logger.error("eplb-vllm: %s: rearrangement given up: %s. %s", self.mover.comm.name, error, what)

    def close_later(self) -> None:
        """Close, from a thread of its own: the last rank to leave waits for the others."""
        threading.Thread(target=self._close, name=f"eplb-vllm-close-{self.mover.comm.name}").start()

    def _close(self) -> None:
        try:
            self.publish()
            self.mover.close()
            if self._exporter is not None:
                self._exporter.forget(self.stats)
        except Exception as error:  # nobody waits for this thread; what was held is released all the same
            logger.warning("eplb-vllm: closing %s: %s", self.mover.comm.name, error)


def _landing(
    settings: Settings, info: Any, expert_weights: Sequence[Tensors], expert_buffer: Tensors
) -> tuple[eplb.EPLBConfig, list[Tensors] | None]:
    """Return the configuration and the landing rows: vLLM's expert buffer where the backend takes rows."""
    if settings.landing == "own" or not _fits(info, expert_weights, expert_buffer):
        return settings.config, None
    config = settings.config
    if not settings.slots_chosen:
        config = config.model_copy(update={"staging_layers": 1})  # no device memory beside vLLM's
    return config, [list(expert_buffer)]


def _fits(info: Any, expert_weights: Sequence[Tensors], expert_buffer: Tensors) -> bool:
    return info.landing_layout == "rows" and all(
        len(layer) == len(expert_buffer)
        and all(
            (tensor.shape, tensor.stride(), tensor.dtype) == (row.shape, row.stride(), row.dtype)
            for tensor, row in zip(layer, expert_buffer, strict=True)
        )
        for layer in expert_weights
    )


def _exporter() -> Any:
    try:
        from eplb_vllm.metrics import the_exporter
    except ImportError:  # a vLLM without Prometheus exports nothing
        return None
    return the_exporter()
