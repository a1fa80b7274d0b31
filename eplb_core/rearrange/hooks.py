"""The typed facade over one communicator's hooks; nothing outside it touches a plugin manager."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from eplb_core.backend import Buffers, ConnectReceipt, Event, LocalMetadata, PeerMetadata, TransferReceipt, hookspecs
from eplb_core.errors import ConfigError, DiscoveryError, TransferError

if TYPE_CHECKING:
    from eplb_core.backend import TransferPlan

logger = logging.getLogger("eplb_core")

MAX_PAYLOAD_NBYTES = 1 << 20
_HOOKS = ("register_buffers", "exchange_metadata", "transfer", "wait")
T = TypeVar("T")


class BackendHooks:
    """The four hooks of one backend, with the observers of one communicator around them.

    Parameters
    ----------
    backend_name : str
        Name of the backend, for messages.
    backend : object
        The object that implements the four hooks without being a wrapper.
    observers : sequence of object
        Wrapper implementations of the four hooks, and implementations of ``observe``.

    Raises
    ------
    DiscoveryError
        A hook is missing, lacks ``@hookimpl``, or an observer would replace the backend (EPLB-D003).
    ConfigError
        An observer implements no hook (EPLB-C010).
    """

    def __init__(self, backend_name: str, backend: object, observers: Sequence[object] = ()) -> None:
        self._backend_name = backend_name
        self._manager = manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs.BackendSpec)
        try:
            manager.register(backend, name=backend_name)
            for observer in observers:
                manager.register(observer, name=observer_name(observer))
                if not manager.get_hookcallers(observer):
                    raise ConfigError("EPLB-C010", problem=f"the observer {observer!r} implements no hook")
            manager.check_pending()
        except ConfigError:  # which is a ValueError as well
            raise
        except (pluggy.PluginValidationError, ValueError) as error:
            raise DiscoveryError("EPLB-D003", backend=backend_name, reason=f"its hooks do not fit: {error}") from error
        for hook in _HOOKS:
            implementations = [
                i for i in getattr(manager.hook, hook).get_hookimpls() if not (i.wrapper or i.hookwrapper)
            ]
            strangers = [i.plugin_name for i in implementations if i.plugin is not backend]
            if strangers:
                raise DiscoveryError(
                    "EPLB-D003",
                    backend=backend_name,
                    reason=f"observer {strangers[0]!r} implements {hook} without wrapper=True and would replace it",
                )
            if not implementations:
                missing = "lacks @hookimpl" if callable(getattr(backend, hook, None)) else "is missing"
                raise DiscoveryError("EPLB-D003", backend=backend_name, reason=f"its {hook} {missing}")
        self.observed = bool(observers)
        self._hook: Any = manager.hook
        self._observers: list[tuple[str, Any]] = [
            (i.plugin_name, i.function if i.argnames else lambda _event, call=i.function: call())
            for i in manager.hook.observe.get_hookimpls()
            if not (i.wrapper or i.hookwrapper)
        ]

    def register_buffers(self, buffers: Buffers) -> LocalMetadata:
        """See `BackendSpec.register_buffers`."""
        local = self._typed("register_buffers", self._hook.register_buffers(buffers=buffers), LocalMetadata)
        payload: object = local.payload
        if not isinstance(payload, bytes) or len(payload) > MAX_PAYLOAD_NBYTES:
            raise DiscoveryError(
                "EPLB-D003",
                backend=self._backend_name,
                reason=f"its metadata must be bytes, at most {MAX_PAYLOAD_NBYTES} of them",
            )
        return local

    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt:
        """See `BackendSpec.exchange_metadata`."""
        receipt = self._hook.exchange_metadata(local=local, peers=peers)
        return self._typed("exchange_metadata", receipt, ConnectReceipt)

    def transfer(self, plan: TransferPlan) -> object:
        """See `BackendSpec.transfer`."""
        return self._typed("transfer", self._hook.transfer(plan=plan), object)

    def wait(self, handle: object, timeout_s: float) -> TransferReceipt:
        """See `BackendSpec.wait`."""
        return self._typed("wait", self._hook.wait(handle=handle, timeout_s=timeout_s), TransferReceipt)

    def observe(self, event: Event) -> Mapping[str, bytes]:
        """Tell every observer, and return its evidence by observer name, which pluggy's own call would lose."""
        evidence: dict[str, bytes] = {}
        for name, function in self._observers:
            answer = function(event)
            if answer is not None:
                if not isinstance(answer, bytes):
                    raise TransferError(
                        "EPLB-T007", rank="this", where="observe", reason=f"observer {name!r} returned no bytes"
                    )
                evidence[name] = answer
        return evidence

    def tell(self, event: Event) -> None:
        """Tell every observer of something that cannot be undone; an observer that raises is logged."""
        for name, function in self._observers:
            try:
                function(event)
            except Exception:
                logger.exception("observer %r raised at %s of layer %s", name, event.kind, event.layer)

    def close(self) -> None:
        """Forget the backend and the observers, which a plugin manager, referring to itself, would keep alive."""
        for plugin in self._manager.get_plugins():
            self._manager.unregister(plugin)
        self._observers.clear()

    def _typed(self, hook: str, value: object, kind: type[T]) -> T:
        if value is None or not isinstance(value, kind):
            raise DiscoveryError(
                "EPLB-D003",
                backend=self._backend_name,
                reason=f"its {hook} returned {value!r} instead of {'a handle' if kind is object else kind.__name__}",
            )
        return value


def observer_name(observer: object) -> str:
    """Return the name under which an observer's evidence travels: its ``name``, else its class's."""
    return str(getattr(observer, "name", None) or type(observer).__qualname__)
