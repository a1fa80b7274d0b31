"""Ranks that stay: processes that run one scenario after another, so that a kit of many checks starts few of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from eplb_core.control.plane import ControlPlane
from eplb_core.testing.course import Course
from eplb_core.testing.expectation import PREFIX, NotReached, UnheardError, Unmet, told
from eplb_core.testing.ranks import Rank, Ranks

_GRACE_S = 3.0
_IDLE_S = 3600.0


@dataclass(frozen=True)
class Subject:
    """The backend that a scenario is about, as every rank builds it.

    Parameters
    ----------
    backend : str
        Name of the backend.
    options : mapping of str to object
        Options given to every communicator.
    device_type : str
        Where the weights live.
    device_group : bool
        Does it need the host's process group? It is then given a gloo group of the ranks.
    """

    backend: str
    options: Mapping[str, Any] | None = None
    device_type: str = "cpu"
    device_group: bool = False


class Stage:
    """What a scenario is given on each rank: who it is, and a namespace of the store in which ranks meet.

    Parameters
    ----------
    rank : Rank
        The process that runs the scenario.
    world_size : int
        Ranks that take part.
    namespace : str
        Namespace of the store that this run of the scenario has to itself.
    """

    def __init__(self, rank: Rank, world_size: int, namespace: str) -> None:
        self.rank = rank.rank
        self.world_size = world_size
        self._namespace = namespace
        self._rank = rank
        self._groups = 0
        self._client = _client_of(rank)
        self._store = dist.PrefixStore(f"{namespace}/meet", self._client)
        self._meetings = 0

    def control(self, name: str = "") -> ControlPlane:
        """Make a control plane over the run's namespace."""
        store = dist.PrefixStore(f"{self._namespace}/control{name}", self._client)
        return ControlPlane.from_store(store, rank=self.rank, world_size=self.world_size)

    def device_group(self, subject: Subject, members: Sequence[int] | None = None) -> Any:
        """Make a process group of these ranks (None is all of the scenario), where the subject needs one, else None."""
        if not subject.device_group:
            return None
        self._groups += 1
        ranks = range(self.world_size) if members is None else members
        return self._rank.device_group(ranks, f"{self._namespace}/group {list(ranks)} {self._groups}")

    def num_keys(self) -> int:
        """Return how many keys the whole store holds."""
        return int(self._client.num_keys())

    def say(self, word: str) -> None:
        """Set a word that another rank waits for."""
        self._store.set(word, "1")

    def hear(self, word: str, timeout_s: float = 15.0, pump: Callable[[], object] | None = None) -> None:
        """Wait until a rank has said a word, calling `pump` meanwhile, as the core does while it votes."""
        unheard = UnheardError(f"rank {self.rank} did not hear {word!r} within {timeout_s:.0f} s")
        if pump is None:
            try:
                self._store.wait([word], timedelta(seconds=timeout_s))
            except dist.DistStoreError:
                raise unheard from None
            return
        until = time.monotonic() + timeout_s
        while not self._store.check([word]):
            pump()
            if time.monotonic() > until:
                raise unheard
            time.sleep(5e-4)

    def has_heard(self, word: str) -> bool:
        """Has a rank said a word? Does not wait."""
        return bool(self._store.check([word]))

    @contextmanager
    def inside(self, call: str, *, judged: bool = False) -> Iterator[None]:
        """Let the pool know that this rank is in a call of the backend, from which it may not come back.

        Parameters
        ----------
        call : str
            Name of the call, as shown in "rank 0 is still in `call` after 8 s".
        judged : bool
            Is the current test about whether this call returns?
        """
        self._rank.tell(("inside", (call, judged)))
        try:
            yield
        finally:
            self._rank.tell(("inside", None))

    def meet(self, pump: Callable[[], object] | None = None) -> None:
        """Wait until every rank of the scenario is here."""
        self._meetings += 1
        self.say(f"{self._meetings}/{self.rank}")
        for other in range(self.world_size):
            self.hear(f"{self._meetings}/{other}", pump=pump)


Scenario = Callable[..., Any]


class RankPool:
    """Processes that run scenarios until one fails; then they are killed, and the next run starts new ones.

    Parameters
    ----------
    world_size : int
        Number of processes; a scenario may use fewer.
    env : mapping of str to str or None
        Environment variables to set in the ranks.

    Notes
    -----
    They are daemonic, as an engine's workers may be, so a backend that starts processes of its own fails.
    """

    def __init__(self, world_size: int, env: Mapping[str, str] | None = None) -> None:
        self._world_size = world_size
        self._env = dict(env or {})
        self._ranks: Ranks | None = None
        self._runs = 0

    def run(
        self,
        scenario: Scenario,
        *args: Any,
        world_size: int = 2,
        timeout_s: float = 40.0,
        without: tuple[int, ...] = (),
    ) -> list[Any]:
        """Run ``scenario(stage, *args)`` on ranks 0 to ``world_size - 1`` and return their values.

        Parameters
        ----------
        scenario : callable
            Importable by the ranks.
        *args
            Passed on.
        world_size : int
            Ranks that take part.
        timeout_s : float
            Limit of the whole run, seconds.
        without : tuple of int
            Ranks that the scenario kills: their values are None, and the processes are replaced afterwards.

        Raises
        ------
        Unmet
            What the scenario expects does not hold on a rank; the message says on which, and how.
        NotReached
            A rank raised, died, or did not end in time, before that could be seen.
        """
        ranks = self._ready()
        self._runs += 1
        for rank in range(world_size):
            ranks.tell(rank, (f"run{self._runs}", world_size, scenario, args))
        values: dict[int, Any] = dict.fromkeys(without)
        course = Course(timeout_s)
        until = time.monotonic() + timeout_s
        while silent := [rank for rank in range(world_size) if rank not in values and rank not in course.failures]:
            if time.monotonic() > until or course.explained_by(silent):
                break
            for rank in silent:
                kind, value = _heard(ranks, rank)
                if kind == "value":
                    values[rank] = value
                elif kind == "inside":
                    course.goes(rank, value)
                elif kind:
                    course.failures[rank] = (kind, value)
                    until = min(until, time.monotonic() + _GRACE_S)
        if course.failures or silent:
            self.close()
            raise course.verdict(silent)
        if without:
            self.close()
        return [values[rank] for rank in range(world_size)]

    def _ready(self) -> Ranks:
        """Return the processes, started and waiting for a scenario."""
        if self._ranks is None:
            self._ranks = Ranks(self._world_size, serve, env=self._env, daemon=True)
            for rank in range(self._world_size):
                self._ranks.hear(rank)
        return self._ranks

    def close(self) -> None:
        """End the processes."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            with ranks:
                for rank in range(self._world_size):
                    with suppress(OSError):  # it is gone
                        ranks.tell(rank, None)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_CLIENTS: dict[int, Any] = {}


def _client_of(rank: Rank) -> Any:
    """Return this process's connection to the store, made once."""
    if rank.port not in _CLIENTS:
        _CLIENTS[rank.port] = rank.store()
    return _CLIENTS[rank.port]


def serve(rank: Rank) -> None:
    """Run scenarios that the pool sends until it sends None."""
    rank.tell("here")
    while (order := rank.listen(_IDLE_S)) is not None:
        namespace, world_size, scenario, args = order
        try:
            value = scenario(Stage(rank, world_size, namespace), *args)
        except Unmet as error:
            rank.tell(("unmet", str(error)))
        except NotReached as error:
            rank.tell(("not reached", str(error).removeprefix(PREFIX)))
        except UnheardError as error:
            rank.tell(("unheard", str(error)))
        except Exception as error:
            rank.tell(("raised", told(error)))
        else:
            rank.tell(("value", value))


def _heard(ranks: Ranks, rank: int) -> tuple[str, Any]:
    """Return (kind, value) of a rank's next note; the kind is empty when there is none within 10 ms."""
    try:
        kind, value = ranks.hear(rank, 0.01)
    except TimeoutError:
        return "", None
    except AssertionError:
        return "died", "its process ended: a crash of native code, or an exit"
    return kind, value
