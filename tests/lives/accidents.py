"""What may go wrong while ranks rearrange: a rank that fails, dies, stops or comes late, a store that is silent."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.lives.calls import Fault
from tests.lives.play import Play
from tests.lives.processes import RankProcess

Moments = list[tuple[float, Callable[[], None]]]

_FOREVER = math.inf
_KINDS = {
    "none": 7.0,
    "raise": 5.0,
    "kill": 2.0,
    "stop": 2.5,
    "delay": 1.5,
    "interrupt": 1.5,
    "kill at": 2.0,
    "stop at": 2.0,
    "late": 1.0,
    "differ": 0.7,
    "store": 0.7,
}
_PHASES = {"agree": 2, "transfer": 2, "wait": 2, "landed": 2, "vote": 2, "tally": 1, "commit": 2}


@dataclass(eq=False)
class Accident:
    """What happens during one rearrangement.

    Parameters
    ----------
    say : str
        For people.
    faults : dict of RankProcess to Fault
        Injected within the call.
    moments : list of (float, callable)
        Seconds after its start, and what happens then.
    delays : dict of RankProcess to float
        Who makes the call later, in seconds.
    other_map : RankProcess or None
        Who is given another new placement than the others.
    """

    say: str = "no accident"
    faults: dict[RankProcess, Fault] = field(default_factory=dict)
    moments: Moments = field(default_factory=list)
    delays: dict[RankProcess, float] = field(default_factory=dict)
    other_map: RankProcess | None = None

    @property
    def timed(self) -> bool:
        """Does anything depend on when it happens?"""
        return bool(self.moments or self.delays)

    def __bool__(self) -> bool:
        return bool(self.faults or self.timed or self.other_map)


def draw_accident(play: Play, actors: list[RankProcess], rng: random.Random) -> Accident:
    """Draw what happens to one of those who are about to rearrange, or nothing."""
    timeout_s = play.world.timeout_s
    victim = rng.choice(actors)
    label = victim.label
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    at_s, nap_s = draw_moment(rng), _draw_nap(rng, timeout_s)
    after = f"after {at_s * 1000:.1f} ms"
    if kind.startswith("kill") and len(play.living()) < 2:
        kind = "none"
    if kind in ("raise", "kill", "stop", "delay", "interrupt"):
        phase = rng.choices(list(_PHASES), list(_PHASES.values()))[0]
        layer = None if phase == "agree" or rng.random() < 0.6 else rng.randrange(len(play.world.layers))
        fault = Fault(phase, kind, layer, delay_s=rng.uniform(0.1, 1.5) * timeout_s)
        victim.stops_itself_for_s = nap_s if kind == "stop" else None
        nap = f", wakes after {nap_s:.2f} s" if kind == "stop" else ""
        return Accident(f"{label}: {fault}{nap}", faults={victim: fault})
    if kind == "kill at":
        return Accident(f"{label} killed {after}", moments=[(at_s, victim.kill)])
    if kind == "stop at":
        moments: Moments = [(at_s, victim.stop)]
        if nap_s != _FOREVER:
            moments.append((at_s + nap_s, victim.wake))
        return Accident(f"{label} stopped {after} for {nap_s:.2f} s", moments=moments)
    if kind == "late":
        late_s = rng.uniform(0.3, 2.0) * timeout_s
        return Accident(f"{label} comes {late_s:.2f} s late", delays={victim: late_s})
    if kind == "differ":
        return Accident(f"{label} is given another new map", other_map=victim)
    if kind == "store":
        nap_s = rng.uniform(0.5, 2.5) * timeout_s
        return Accident(f"the store's host stopped {after} for {nap_s:.2f} s", moments=store_stops(play, at_s, nap_s))
    return Accident()


def store_stops(play: Play, at_s: float, nap_s: float) -> Moments:
    """Stop the store's host for a while."""

    def stop() -> None:
        play.store_stopped = True
        play.store.stop()

    return [(at_s, stop), (at_s + nap_s, play.store.wake)]


def draw_moment(rng: random.Random) -> float:
    """Draw a moment within a call, which lasts from some to some hundred milliseconds."""
    return math.exp(rng.uniform(math.log(0.0005), math.log(0.2)))


def _draw_nap(rng: random.Random, timeout_s: float) -> float:
    longer = timeout_s * rng.uniform(1.1, 2.5) + 0.2
    return rng.choices([longer, timeout_s * rng.uniform(0.1, 0.9), _FOREVER], [5, 2, 3])[0]
