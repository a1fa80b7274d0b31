"""A job and its host: lives of ranks, weights, communicators, and calls that all members make together."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import numpy as np

import eplb_core as eplb
from tests.lives.accidents import Accident, Moments
from tests.lives.calls import Call, Command, Fault
from tests.lives.oracle import Finding, Kind, Together, bound_s
from tests.lives.play import Play
from tests.lives.processes import RankProcess
from tests.lives.worlds import Map, first_map, next_map

STRANGERS_VERSION = 1000
"""Of the bytes of another group's weights."""


class Job:
    """What the host of all ranks does, and what it knows.

    Parameters
    ----------
    play : Play
        Who acts.
    seed : str
        What is drawn from.

    Attributes
    ----------
    rng : random.Random
        Of the step at hand.
    version : int
        How often the weights were loaded anew.
    members : list of int
        Who rearranges together, as far as the host knows.
    health : str
        "new": not connected yet. "ok": the last collective call succeeded on every member. "failed": it failed on
        every member, all of which live and hold one placement. "unknown": anything else.
    failed : (Map, Map, frozenset of RankProcess) or None
        The last rearrangement that failed: from, to, and who was told so and has not forgotten since.
    """

    def __init__(self, play: Play, seed: str) -> None:
        self.play, self.world = play, play.world
        self.seed = seed
        self.rng = random.Random(seed)
        self.version = 0
        self.everyone = list(range(self.world.world_size))
        self.members = self.everyone
        self.health = "new"
        self.failed: tuple[Map, Map, frozenset[RankProcess]] | None = None
        self.can_reload = hasattr(eplb.Communicator, "reloaded")
        self._cohorts = 0

    # --- lives -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start every rank, with weights and a communicator."""
        self.start_job(first_map(self.world, self.rng))

    def start_job(self, mapping: Map) -> None:
        for process in self.play.start(self.everyone):
            self.play.ranks[process.rank] = process
        self.load(list(self.play.ranks.values()), mapping)
        self.build(list(self.play.ranks.values()))
        self.members, self.health, self.failed = self.everyone, "new", None
        self.one_cohort(self.play.ranks.values())

    def one_cohort(self, processes: Iterable[RankProcess]) -> None:
        """Note that these have one past: built at a time, or rebuilt together."""
        self._cohorts += 1
        for process in processes:
            process.cohort = self._cohorts

    def load(self, processes: list[RankProcess], mapping: Map) -> None:
        """Let hosts load their weights."""
        arguments = self.weights(mapping)
        for process in processes:
            process.version, process.held, process.invalid = self.version, mapping, False
        self.play.act({process: self.command("load", arguments) for process in processes})

    def build(self, processes: list[RankProcess], spread_s: float = 0.1) -> None:
        """Let hosts build their communicators."""
        new_control = self.rng.random() < 0.5
        self.failed = None  # whoever is new takes the host's word for what it holds
        done = self.play.act(
            {
                process: self.command("build", {"new_control": new_control}, delay_s=self.rng.uniform(0, spread_s))
                for process in processes
            }
        )
        for process, calls in done.items():
            process.built, process.fresh, process.open = calls[-1].ok, True, False
            self.one_cohort([process])

    def replace(self, former: RankProcess, mapping: Map) -> None:
        """Start the process of a rank again, with the weights of a placement."""
        (process,) = self.play.start([former.rank])
        self.play.ranks[process.rank] = process
        self.load([process], mapping)
        self.build([process])
        self.health = "unknown"

    def close(self, processes: list[RankProcess], force: bool) -> None:
        """Let hosts close their communicators."""
        command = self.command("close", {"force": force})
        for process in self.play.act(dict.fromkeys(processes, command)):
            process.built = process.open = False

    def reference(self) -> Map | None:
        """Return the placement that the host goes by: that of the lowest rank that is up to date."""
        for process in self.play.free():
            if process.version == self.version and not process.invalid and process.held is not None:
                return process.held
        return None

    def refit(self, process: RankProcess) -> None:
        """Give a rank that was left behind the weights of the placement that the others hold."""
        mapping = self.reference()
        if mapping is None:
            mapping = process.held
        assert mapping is not None
        self.health, self.failed = "unknown", None
        last = process.calls[-1] if process.calls else None
        settled = not (process.invalid or process.open or (last is not None and (last.doubtful or last.decided)))
        if self.can_reload and process.built and settled and self.rng.random() < 0.7:
            arguments = self.weights(mapping)
            process.version = self.version
            self.play.act({process: self.command("reload", arguments)})
            return
        if process.built:
            self.close([process], force=True)
        if process.free:
            self.load([process], mapping)
            self.build([process])

    def weights(self, mapping: Map) -> dict[str, object]:
        """Return what a host is told to load, and which other versions are about, for findings to name them."""
        others = [version for version in range(self.version) if version < STRANGERS_VERSION // 2]
        return {"mapping": mapping, "version": self.version, "versions": [*others, STRANGERS_VERSION]}

    # --- calls of all members ----------------------------------------------------------------------------------------

    def actors(self) -> list[RankProcess]:
        """Return the members that can be called and whose weights are up to date."""
        return [each for each in self.play.free() if each.rank in self.members and each.version == self.version]

    def rearrange_with(
        self,
        actors: list[RankProcess],
        *,
        members: list[int] | None = None,
        maps: tuple[Map, Map] | None = None,
        accident: Accident | None = None,
        layered: Mapping[RankProcess, dict[str, object]] | None = None,
    ) -> bool:
        """Let ranks rearrange.

        Parameters
        ----------
        actors : list of RankProcess
            Who, by rank.
        members : list of int or None
            With whom they believe to be; None is `members`.
        maps : (Map, Map) or None
            From, to, of a call that is repeated; None goes on from what each rank holds to a placement that is drawn.
        accident : Accident or None
            What happens meanwhile.
        layered : mapping or None
            Layer by layer, with these arguments.

        Returns
        -------
        bool
            It succeeded on all of them.
        """
        if not actors:
            return False
        rng, before, shape = self.rng, self.health, layered or {}
        accident = Accident() if accident is None else accident
        members = self.members if members is None else members
        helds = [each.held for each in actors if each.held is not None]
        held = helds[0]
        synced = (
            all(np.array_equal(each, held) for each in helds)
            and len({each.cohort for each in actors}) == 1
            and not any(each.invalid or each.version != self.version for each in actors)
        )
        new = next_map(self.world, held, members, rng) if maps is None else maps[1]
        news = {each.rank: new for each in actors}
        if accident.other_map is not None:
            news[accident.other_map.rank] = next_map(self.world, held, members, rng)
        commands = {}
        for process in actors:
            old = maps[0] if maps is not None else process.held
            commands[process] = self.command(
                "layer_by_layer" if layered else "rearrange",
                {"old": old, "new": news[process.rank], **shape.get(process, {})},
                delay_s=accident.delays.get(process, rng.uniform(0, 0.01)),
                fault=accident.faults.get(process),
                calls=2 if layered else 1,
            )
        self.play.say(f"  ranks {[each.rank for each in actors]}: {accident.say}")
        together = Together(self.play.step, news) if synced else None
        done = self.play.act(commands, accident.moments, together=together)
        lasts = {process: calls[-1] for process, calls in done.items() if calls}
        walked_away = any(arguments["stop_after"] is not None for arguments in shape.values())
        whole = len(lasts) == len(actors) and [each.rank for each in actors] == self.members
        succeeded = len(lasts) == len(actors) and all(call.whole for call in lasts.values())
        if succeeded and whole:
            self.health, self.failed = "ok", None
        else:
            equal = all(np.array_equal(call.placement, next(iter(lasts.values())).placement) for call in lasts.values())
            known = not any(call.doubtful or call.decided or call.invalid for call in lasts.values())
            even = whole and synced and equal and known and not any(call.ok for call in lasts.values())
            unharmed = not (accident.timed or walked_away or any(each.stops for each in actors))
            self.health = "failed" if even and unharmed and before != "unknown" else "unknown"
            self.failed = (held, new, frozenset(actors)) if synced and maps is None else self.failed
        healthy = whole and synced and maps is None and not (accident or walked_away)
        if healthy and not self.play.strangers and before != "unknown":
            self._judge_healthy(before, lasts)
        return succeeded

    def _judge_healthy(self, before: str, lasts: dict[RankProcess, Call]) -> None:
        """Judge a rearrangement that nothing disturbed: it succeeds, or is refused by all since the failure before."""
        codes = {call.code for call in lasts.values() if not call.ok}
        starved = any(call.starved_s > 0.2 * self.world.timeout_s for call in lasts.values())
        if not codes or (before == "failed" and codes == {"EPLB-T004"} and not any(call.ok for call in lasts.values())):
            return
        if codes == {"EPLB-T002"} and (starved or before == "new"):  # connecting takes a while on busy cores
            return
        kind = Kind.UNEVEN if before == "failed" and "EPLB-T004" in codes else Kind.CLEAN_FAILED
        text = "".join(f"\n  {process.label}: {call}" for process, call in lasts.items())
        self.play.find(Finding(kind, self.play.step, text))

    def rebuild_together(
        self, commands: dict[RankProcess, Command], ranks: list[int], limit_s: float, moments: Moments | None = None
    ) -> dict[RankProcess, Call]:
        """Let ranks rebuild, all naming the same members; return the last call of each that is done."""
        rebuilding = {process.rank: ranks for process in commands}
        done = self.play.act(commands, moments, rebuilding=rebuilding, limit_s=limit_s)
        lasts = {process: calls[-1] for process, calls in done.items() if calls}
        if lasts and all(call.ok for call in lasts.values()) and sorted(each.rank for each in lasts) == ranks:
            self.members, self.health = ranks, "ok"
            self.one_cohort(lasts)
            return lasts
        self.health = "unknown"
        believers = [process for process in self.play.free() if process in lasts and lasts[process].ok]
        self.rearrange_with(believers, members=ranks, accident=Accident("those who were told that all had met"))
        return lasts

    def rebuild_command(
        self,
        ranks: list[int],
        limit_s: float,
        budget_s: float,
        wrong_first: list[int] | None = None,
        delay_s: float = 0.0,
        connect: bool = False,
    ) -> Command:
        """Return the command; see `tests.lives.rank.Host.rebuild`."""
        arguments = {
            "ranks": ranks,
            "limit_s": limit_s,
            "budget_s": budget_s,
            "wrong_first": wrong_first,
            "first_connect": connect and ranks == self.everyone,
        }
        bound = budget_s + limit_s + bound_s(self.world, limit_s)
        return Command("rebuild", arguments, delay_s=delay_s, bound_s=bound + delay_s)

    def command(
        self,
        method: str,
        arguments: dict[str, object],
        *,
        delay_s: float = 0.0,
        fault: Fault | None = None,
        calls: int = 1,
    ) -> Command:
        """Return a command, bounded as so many calls."""
        return Command(method, arguments, delay_s=delay_s, bound_s=calls * bound_s(self.world) + delay_s, fault=fault)
