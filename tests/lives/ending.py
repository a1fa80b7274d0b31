"""How a history ends: nothing disturbs any more, so those that live must meet, rearrange once, and close in peace."""

from __future__ import annotations

import numpy as np

from tests.lives.accidents import Accident
from tests.lives.calls import Command
from tests.lives.oracle import Finding, Kind, bound_s
from tests.lives.processes import RankProcess
from tests.lives.steps import Steps
from tests.lives.worlds import first_map

_LIMIT_S = 3.0
_BUDGET_S = 7.0
_TRIES = 3
_MORE_WHEN_STARVED = 3


def come_to_an_end(steps: Steps) -> None:
    """Wake who sleeps, end strangers, bring everyone to one placement as a host would, and see that it works.

    What the host may have to do is what the catalogue tells it: load the weights again of a rank that was left behind,
    restart a process whose commit failed or whose landing memory is quarantined as far as the limit allows.
    """
    play = steps.play
    play.step = "end"
    steps.rng.seed(f"{steps.seed}/end")
    for process in play.strangers:
        play.end(process)
    play.strangers.clear()
    sleepers = [each for each in play.living() if each.stopped]
    play.say("end: no more accidents" + (f"; {[each.label for each in sleepers]} wake" if sleepers else ""))
    play.act({}, [(0.0, each.wake) for each in sleepers])
    if not play.living() or steps.rng.random() < 0.2:
        steps.restart_job()
    elif steps.rng.random() < 0.5:
        for former in [each for each in play.ranks.values() if each.gone]:
            _replace(steps, former)
    for process in play.living():
        _put_right(steps, process)
    here = [each.rank for each in play.living()]
    in_order = (steps.health == "ok" and here == steps.members) or (steps.health == "new" and here == steps.everyone)
    if (in_order and steps.rng.random() < 0.5) or _meet(steps):
        _move(steps)
    _close(steps)


def _put_right(steps: Steps, process: RankProcess) -> None:
    """Give a rank what it needs to be one of the others."""
    reference = steps.reference()
    behind = process.version != steps.version or (
        reference is not None and process.held is not None and not np.array_equal(process.held, reference)
    )
    if process.invalid:
        _replace(steps, process)
    elif behind:
        steps.refit(process)
    elif not process.built:
        steps.build([process])
    if not steps.play.ranks[process.rank].built:
        steps.play.find(Finding(Kind.NEVER_MET, "end", f"{process.label} could not build a communicator"))


def _replace(steps: Steps, process: RankProcess) -> None:
    reference = steps.reference()
    steps.play.end(process)
    if reference is None:
        reference = process.held
    if reference is None:
        reference = first_map(steps.world, steps.rng)
    steps.play.say(f"  {process.label} is started again")
    steps.replace(process, reference)


def _meet(steps: Steps) -> bool:
    """Rebuild until all living ranks have met, within a time that is ample."""
    rounds = 1
    while True:
        actors = [each for each in steps.play.living() if each.built]
        ranks = [each.rank for each in actors]
        steps.play.say(f"  rebuild(ranks={ranks})")
        commands = {
            each: steps.rebuild_command(
                ranks,
                _LIMIT_S,
                _BUDGET_S,
                delay_s=steps.rng.uniform(0, 0.2),
                connect=each.fresh and steps.rng.random() < 0.3,
            )
            for each in actors
        }
        lasts = steps.rebuild_together(commands, ranks, _LIMIT_S)
        if steps.health == "ok":
            return True
        used_up = [process for process, call in lasts.items() if call.code == "EPLB-T009" and call.quarantined_nbytes]
        if not used_up and rounds < _MORE_WHEN_STARVED and any(call.starved for call in lasts.values()):
            rounds += 1
            continue
        if not used_up:
            text = "".join(f"\n  {process.label}: {call}" for process, call in lasts.items())
            steps.play.find(Finding(Kind.NEVER_MET, "end", text))
            return False
        for process in used_up:  # as the catalogue says: restart the process
            _replace(steps, process)


def _move(steps: Steps) -> None:
    """Rearrange, where need be after another rebuild: on busy cores a wait may run out that has no other reason."""
    tries = number = 0
    while tries < _TRIES and number < _TRIES + _MORE_WHEN_STARVED:
        number += 1
        if steps.rearrange_with(steps.actors(), accident=Accident(f"try {number}")):
            return
        tries += not steps.play.starved
        if not _meet(steps):
            return
    steps.play.find(Finding(Kind.NEVER_MOVED, "end", f"{number} tries, each after a rebuild"))


def _close(steps: Steps) -> None:
    """Close every communicator and let the processes end by themselves."""
    play = steps.play
    built = [each for each in play.living() if each.free and each.built]
    play.act({each: Command("close", {"force": False}, bound_s=bound_s(steps.world)) for each in built})
    for process in play.living():
        process.condemned = True
        process.pipe.send(None)
    for process in play.living():
        code = process.exit_code(15.0)
        if code != 0:
            text = f"exit code {code}\n{process.stacks() if code is None else process.tail()}"
            play.find(Finding(Kind.CRASH, f"end, {process.label}", text))
