"""What happens in a history, step by step, drawn from its seed and from what became of the step before."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from tests.lives.accidents import Accident, Moments, draw_accident, draw_moment, store_stops
from tests.lives.job import STRANGERS_VERSION, Job
from tests.lives.play import Play
from tests.lives.processes import RankProcess
from tests.lives.worlds import first_map, next_map


class Steps(Job):
    """The host's decisions, and what befalls it.

    Every step draws from a generator of its own, so that one that goes otherwise because of timing leaves the dice of
    the next alone.

    Parameters
    ----------
    play, seed
        See `Job`.
    """

    def __init__(self, play: Play, seed: str) -> None:
        super().__init__(play, seed)
        self._strangers_came = False

    def step(self, number: int) -> None:
        """Draw one step and do it."""
        self.rng = random.Random(f"{self.seed}/step {number}")
        choices = self._choices(first=number == 0)
        name = self.rng.choices(list(choices), [weight for weight, _ in choices.values()])[0]
        self.play.step = f"step {number + 1}"
        self.play.say(f"step {number + 1}: {name} (members {self.members}, {self.health})")
        choices[name][1]()

    def _choices(self, first: bool) -> dict[str, tuple[float, Callable[[], None]]]:
        free, living = self.play.free(), self.play.living()
        dead = [each for each in self.play.ranks.values() if each.gone or each.invalid]
        stopped = [each for each in living if each.stopped]
        well, failed = self.health in ("ok", "new"), self.health == "failed"
        choices = {
            "restart the job": (0.2 if first else 1.0, self.restart_job),
            "rearrange": (0 if not free else 6 if well else 3 if failed else 1.5, self.rearrange),
            "layer by layer": (0 if not free else 3 if well else 1.5 if failed else 0.7, self.layer_by_layer),
            "retry": (0 if not free or self.failed is None else 2 if self.health == "ok" else 4, self.retry),
            "rebuild": (0 if not free else 0.7 if well else 3 if failed else 6, self.rebuild),
            "kill an idle rank": (0 if len(free) < 2 else 0.7, self.kill_idle),
            "stop an idle rank": (0 if len(free) < 2 else 0.7, self.stop_idle),
            "wake": (4 if stopped else 0, self.wake),
            "restart a rank": (4 if dead else 0.7 if stopped else 0, self.restart_rank),
            "close and build again": (0 if not free else 1.0, self.close_and_build),
            "reload": (0.9 if free and len(free) == len(living) and not first else 0, self.reload),
            "strangers": (0 if self._strangers_came or not free else 0.8, self.strangers),
        }
        return {name: choice for name, choice in choices.items() if choice[0]}

    # --- lives -------------------------------------------------------------------------------------------------------

    def restart_job(self) -> None:
        """End every rank, in the middle of a rearrangement or not, and start the job again on the same store."""
        if self.rng.random() < 0.5 and self.play.free():
            at_s = draw_moment(self.rng)
            moments: Moments = [(at_s + self.rng.uniform(0, 0.02), each.kill) for each in self.play.free()]
            accident = Accident(f"all killed after {at_s * 1000:.1f} ms", moments=moments)
            self.rearrange_with(self.actors(), accident=accident)
        for process in self.play.living():
            if process.stopped and self.rng.random() < 0.5:
                self.play.say(f"  {process.label} of the life before stays, stopped")
                self.play.strangers.append(process)
                process.label += " (a life over)"
            elif self.rng.random() < 0.2 and process.free and process.built:
                self.play.act({process: self.command("close", {"force": self.rng.random() < 0.5})})
                self.play.end(process)
            else:
                self.play.end(process)
        self.version += 1
        self.start_job(first_map(self.world, self.rng))

    def restart_rank(self) -> None:
        """Start a rank's process again, while the others live; the former may be stopped only, and wake later."""
        former = self.rng.choice(
            [each for each in self.play.ranks.values() if each.gone or each.stopped or each.invalid]
        )
        reference = self.reference()
        if reference is None:
            self.restart_job()
            return
        if former.stopped:
            self.play.strangers.append(former)
            former.label += " (a life over)"
        else:
            self.play.end(former)
        self.replace(former, reference)
        self._wake_strangers()

    def kill_idle(self) -> None:
        """Kill a rank between two calls."""
        victim = self.rng.choice(self.play.free())
        self.play.say(f"  {victim.label} is killed")
        self.play.end(victim)
        self.health = "unknown"

    def stop_idle(self) -> None:
        """Stop a rank between two calls; the others find out."""
        victim = self.rng.choice(self.play.free())
        self.play.say(f"  {victim.label} is stopped")
        victim.stop()
        if self.rng.random() < 0.7:
            self.rearrange()
        self.health = "unknown"

    def wake(self) -> None:
        """Wake a rank that was stopped; it may act at once, alone, in the group it knew."""
        sleeper = self.rng.choice([each for each in self.play.living() if each.stopped])
        self.play.say(f"  {sleeper.label} wakes")
        self.play.act({}, [(0.0, sleeper.wake)])
        self.health = "unknown"
        if self.rng.random() < 0.3 and sleeper.free and sleeper.built:
            self.rearrange_with([sleeper], accident=Accident("the one that woke, alone"))

    def _wake_strangers(self) -> None:
        for process in self.play.strangers:
            if process.stopped and self.rng.random() < 0.7:
                self.play.say(f"  {process.label} wakes")
                self.play.act({}, [(self.rng.uniform(0, 0.2), process.wake)])
            if process.free and process.built and self.rng.random() < 0.5:
                command = self.rebuild_command(self.everyone, 0.5, 0.3)
                self.play.say(f"  {process.label} calls rebuild(ranks={self.everyone})")
                self.play.act({process: command}, limit_s=0.5)

    def close_and_build(self) -> None:
        """Close communicators and build others over the same weights, all or one."""
        actors = [each for each in self.play.free() if not each.invalid]
        if not actors:
            return
        if self.rng.random() < 0.4:
            actors = [self.rng.choice(actors)]
        force = self.rng.random() < 0.5
        labels = ", ".join(each.label for each in actors)
        self.play.say(f"  {labels}: close(force={force}), then a new communicator")
        self.close(actors, force)
        for process in actors:
            if process.free and process.version != self.version:
                self.refit(process)
        self.build([each for each in actors if each.free and not each.built], spread_s=0.3)
        whole = len(actors) == self.world.world_size
        self.members, self.health = (self.everyone, "new") if whole else (self.members, "unknown")
        if whole:
            self.one_cohort(actors)

    def reload(self) -> None:
        """Rewrite the weights on every rank: another placement where the communicator can be told, new bytes anyway."""
        actors = self.play.free()
        if any(each.open or each.invalid for each in actors) or any(
            call.doubtful or call.decided for each in actors for call in each.calls[-1:]
        ):
            return  # the host waits until it is known what holds
        self.version += 1
        mapping = first_map(self.world, self.rng)
        absent = [rank for rank in self.everyone if rank not in [each.rank for each in actors]]
        for rank in absent:
            mapping[:, self.world.columns(rank)] = -1
        commands = {}
        for process in actors:
            placement = mapping if self.can_reload or process.held is None else process.held
            arguments = self.weights(placement)
            commands[process] = self.command("reload", arguments, delay_s=self.rng.uniform(0, 0.02))
            process.version = self.version
        self.play.act(commands)
        self.failed = None

    # --- rearrangements ----------------------------------------------------------------------------------------------

    def rearrange(self) -> None:
        """Call ``rearrange`` on every member that can, with an accident or none."""
        actors = self.actors()
        if actors:
            self.rearrange_with(actors, accident=draw_accident(self.play, actors, self.rng))

    def layer_by_layer(self) -> None:
        """Do the same layer by layer."""
        actors = self.actors()
        if actors:
            accident = draw_accident(self.play, actors, self.rng)
            self.rearrange_with(actors, accident=accident, layered=self._layered_arguments(actors))

    def retry(self) -> None:
        """Make the call that failed once more, with the same maps, whatever holds by now."""
        assert self.failed is not None
        old, new, who = self.failed
        if who.issuperset(self.actors()):
            self.rearrange_with(self.actors(), maps=(old, new), accident=Accident("the same maps again"))

    def _layered_arguments(self, actors: list[RankProcess]) -> dict[RankProcess, dict[str, object]]:
        rng = self.rng
        leaves = None if rng.random() < 0.8 else rng.choice([actors, [rng.choice(actors)]])
        after = rng.randint(0, len(self.world.layers))
        return {
            process: {
                "lag": rng.randint(0, self.world.staging_layers - 1),
                "stop_after": after if leaves is not None and process in leaves else None,
                "commit_decided": rng.random() < 0.6,
            }
            for process in actors
        }

    # --- rebuilds ----------------------------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Rebuild with all that can: together, late, with wrong members first, unequally often, one killed meantime."""
        rng = self.rng
        actors = [each for each in self.play.free() if not each.invalid]
        for process in [each for each in actors if each.version != self.version or rng.random() < 0.3]:
            reference = self.reference()
            if process.version != self.version or (
                reference is not None and not np.array_equal(process.held, reference)
            ):
                self.refit(process)
        actors = [each for each in self.play.free() if not each.invalid and each.version == self.version]
        if not actors:
            return
        ranks = [each.rank for each in actors]
        limit_s = rng.uniform(0.5, 1.5)
        pattern = rng.choices(["together", "late", "wrong first", "unequal", "one missing"], [4, 2, 2, 2, 0.7])[0]
        victim = rng.choice(actors)
        if pattern == "one missing" and ranks == self.everyone:
            pattern = "together"
        if pattern == "one missing":
            ranks = sorted({*ranks, rng.choice([rank for rank in self.everyone if rank not in ranks])})
        commands = {}
        for process in actors:
            delay_s = rng.uniform(0, 0.1)
            budget_s = limit_s * rng.uniform(1, 2)
            wrong_first = None
            if process is victim and pattern == "late":
                delay_s = limit_s * rng.uniform(0.5, 1.5)
            if process is victim and pattern == "wrong first":
                wrong_first = sorted({process.rank, *rng.sample(self.everyone, rng.randint(0, len(self.everyone) - 1))})
                wrong_first = None if wrong_first == ranks else wrong_first
            if pattern == "unequal":
                delay_s, budget_s = rng.uniform(0, limit_s), limit_s * rng.uniform(0, 2.5)
            connect = process.fresh and rng.random() < 0.4
            if wrong_first == [process.rank]:
                connect = False  # a member that met itself alone is connected: connect() has nothing left to do
            commands[process] = self.rebuild_command(ranks, limit_s, budget_s, wrong_first, delay_s, connect=connect)
        moments: Moments = []
        accident = ""
        if rng.random() < 0.2 and len(actors) > 1:
            at_s = rng.uniform(0, 0.3)
            if rng.random() < 0.5:
                moments, accident = [(at_s, victim.kill)], f", {victim.label} killed after {at_s:.2f} s"
            else:
                moments = [(at_s, victim.stop), (at_s + rng.uniform(0.5, 2) * limit_s, victim.wake)]
                accident = f", {victim.label} stopped after {at_s:.2f} s"
        elif rng.random() < 0.05:
            moments = store_stops(self.play, rng.uniform(0, 0.3), rng.uniform(0.5, 2.5) * self.world.timeout_s)
            accident = ", the store's host stopped for a while"
        self.play.say(f"  rebuild(ranks={ranks}) by {[each.rank for each in actors]}, {pattern}{accident}")
        self.rebuild_together(commands, ranks, limit_s, moments)

    # --- strangers ---------------------------------------------------------------------------------------------------

    def strangers(self) -> None:
        """Let another group of ranks use the same store and name, with weights of their own."""
        self._strangers_came = True
        rng = self.rng
        others = self.play.start(self.everyone, "stranger")
        self.play.strangers.extend(others)
        version, self.version = self.version, STRANGERS_VERSION
        mapping = first_map(self.world, rng)
        self.load(others, mapping)
        self.build(others)
        self.version = version
        later_s = rng.choice([0.0, rng.uniform(0, 0.05), rng.uniform(0, 0.5)])
        others = [each for each in others if each.free and each.built]
        ours = self.actors()
        commands, news = {}, {}
        for process in [*ours, *others]:
            stranger = process in others
            old = mapping if stranger else process.held
            assert old is not None
            kept = self.everyone if stranger else self.members
            new = news.setdefault(stranger, next_map(self.world, old, kept, rng))
            delay_s = rng.uniform(0, 0.02) + (later_s if stranger else 0.0)
            commands[process] = self.command("rearrange", {"old": old, "new": new}, delay_s=delay_s)
        self.play.say(f"  both groups rearrange, the strangers {later_s:.2f} s later")
        self.play.act(commands)
        self.health = "unknown"
        if rng.random() < 0.5:
            force = rng.random() < 0.5
            self.close([each for each in others if each.free], force)
            for process in others:
                if not process.gone:
                    self.play.end(process)
            self.play.strangers = [each for each in self.play.strangers if not each.gone]
