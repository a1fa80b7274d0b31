"""Every order of what ranks do when they rearrange in the background: a scheduler over the code that decides.

`LayerVote`, `EngineStep`, `PromiseBook` and `moves` are the package's own. Store, transfers, copies on the device and
the engines' all-to-all are as plain as can be: what matters is who waits for whom, and what was there when.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from eplb_core.balancing.engine_step import EngineStep
from eplb_core.balancing.layer_moves import moves
from eplb_core.balancing.layer_vote import LayerVote
from eplb_core.balancing.promise import Outcome, PromiseBook
from eplb_core.errors import EplbError

LOCK = threading.Condition()
FORWARD = None  # an engine that is not in step() is in a forward pass


@dataclass(frozen=True)
class Rules:
    """What the ranks run; a test takes a rule out by putting something else in its place."""

    vote: type[LayerVote] = LayerVote
    engine: type[EngineStep] = EngineStep
    book: type[PromiseBook] = PromiseBook
    moves: Callable = moves
    margin: int = 1
    put_compares: bool = True
    hurried: tuple[int, ...] = ()
    """Ranks that vote on a layer before the layer before it is committed."""
    engines_may_wait_for_rows: bool = False
    agree_waits_for_copies: bool = True
    keys_outlive_generation: bool = True
    landing_waits_for_device: bool = False
    counters_start_equal: bool = True
    rebuild_settles: bool = True


@dataclass(frozen=True)
class Case:
    """How much happens, and what may go wrong."""

    ranks: int = 2
    layers: int = 1
    generations: int = 1
    slots: int = 2
    kill: bool = False
    worker_dies: bool = False
    times_out: bool = False


class Violation(Exception):
    """The protocol did not keep its word."""


@dataclass
class Rank:
    """One rank as it stands between two operations; layers are numbered over all generations, sets of them are bits."""

    book: PromiseBook
    alive: bool = True
    rebuilt: bool = False
    worker_dead: bool = False
    engine: EngineStep | None = FORWARD
    generation: int = 0
    agreed: int = 0
    place: int = 0
    vote: LayerVote | None = None
    started: int = 0
    landed: int = 0
    committed: int = 0
    copied: int = 0

    def copy(self):
        other, book = copied(self), copied(self.book)
        book.promised, book.due, book.known = dict(book.promised), dict(book.due), dict(book.known)
        other.book = book
        if self.engine is not FORWARD:
            other.engine = copied(self.engine)
            other.engine.book = book
        if self.vote is not None:
            other.vote = copied(self.vote)
            other.vote.book = book
        return other


@dataclass
class Layer:
    """What the store holds of one layer, and the forward pass after which the first rank committed it."""

    landed: tuple
    promise: tuple
    landed_count: int = 0
    promise_count: int = 0
    ready: bool = False
    decision: Outcome | None = None
    deleted: bool = False
    committed_after: int | None = None


@dataclass
class World:
    """All ranks and the store."""

    ranks: list[Rank]
    layers: list[Layer]
    killed: bool = False
    worker_died: bool = False


@dataclass
class Result:
    """How many states there are, and the first schedule that ends badly, if one does."""

    states: int
    violation: str | None = None
    schedule: list[str] = field(default_factory=list)


def copied(thing):
    twin = object.__new__(type(thing))
    twin.__dict__.update(thing.__dict__)
    return twin


class Model:
    """All schedules of a case under some rules."""

    def __init__(self, case=Case(), rules=Rules()):
        self.case, self.rules = case, rules
        self.count = case.layers * case.generations
        generations = [list(range(start, start + case.layers)) for start in range(0, self.count, case.layers)]
        self.moves = [
            [list(self.expanded(rank, layers)) for layers in generations] for rank in range(case.ranks)
        ]  # by rank and generation

    def expanded(self, rank, layers):
        """Write out what staging a layer is: `Rearrangement.stage` of the core."""
        if rank in self.rules.hurried:
            yield from self.hurried(layers)
            return
        started = set()
        for verb, layer in self.rules.moves(layers, self.case.slots):
            if verb != "stage":
                yield verb, layer
                continue
            place = layers.index(layer)
            for due in layers[place : place + self.case.slots]:
                if due not in started:
                    started.add(due)
                    yield "start", due
            yield "land", layer
            yield "vote", layer

    def hurried(self, layers):
        for layer in layers[: self.case.slots]:
            yield "start", layer
        for place, layer in enumerate(layers):
            yield "land", layer
            yield "vote", layer
            for later in layers[place + self.case.slots : place + self.case.slots + 1]:
                yield "await copies", layer
                yield "start", later

    def explore(self, limit=20_000_000):
        """Try every order, shortest schedules first, until one ends badly or all are tried."""
        world = self.start()
        seen, paths, queue = {hash(self.key(world))}, [(None, "start")], deque([world])
        at = -1
        while queue:
            world = queue.popleft()
            at += 1
            found = False
            for text, number, do, args in self.steps(world):
                found = True
                after = World(list(world.ranks), list(world.layers), world.killed, world.worker_died)
                after.ranks[number] = world.ranks[number].copy()
                try:
                    do(after, after.ranks[number], number, *args)
                    self.check(after)
                except (Violation, EplbError) as broken:
                    return Result(len(seen), str(broken), [*self.path(paths, at), f"{number}: {text}"])
                key = hash(self.key(after))
                if key not in seen:
                    if len(seen) >= limit:
                        raise AssertionError(f"more than {limit} states")
                    seen.add(key)
                    paths.append((at, f"{number}: {text}"))
                    queue.append(after)
            if not found and not self.at_goal(world):
                return Result(len(seen), "nobody can go on", self.path(paths, at))
        return Result(len(seen))

    @staticmethod
    def path(paths, at):
        texts = []
        while at:
            at, text = paths[at]
            texts.append(text)
        return texts[::-1]

    def start(self):
        ranks = []
        for number in range(self.case.ranks):
            book = self.rules.book()
            book.changed, book.margin = LOCK, self.rules.margin
            book.step = self.offset(number)
            ranks.append(Rank(book))
        nobody = (None,) * self.case.ranks
        return World(ranks, [Layer(nobody, nobody) for _ in range(self.count)])

    def offset(self, number):
        return 0 if self.rules.counters_start_equal else number

    def at_goal(self, world):
        """Nothing is left to do; after a death the engines stop for good, and what is left is the rebuild's."""
        if world.killed:
            return all(rank.rebuilt for rank in world.ranks if rank.alive)
        return all(
            rank.worker_dead or (rank.generation == self.case.generations and rank.committed == rank.copied)
            for rank in world.ranks
        )

    # --- which states are the same ------------------------------------------------------------------------------------

    def key(self, world):
        """Describe a state, with steps counted from the slowest rank's, and without what nobody will look at again."""
        base = min((rank.book.step for rank in world.ranks if rank.alive), default=0)
        steps = [self.layer_base(world, number, base) for number in range(self.count)]

        def at(step, number):
            return step if step is None or steps[number] is None else step - steps[number]

        def outcome(what, number):
            if what is None:
                return None
            return "abort" if what.step is None else "commit" if steps[number] is None else what.step - base

        ranks = []
        for rank in world.ranks:
            if not rank.alive:
                ranks.append(None)
                continue
            book, vote, engine = rank.book, rank.vote, rank.engine
            mark = [
                (rank.rebuilt, rank.worker_dead, rank.generation, rank.agreed, rank.place, book.step - base),
                (rank.started, rank.landed, rank.committed, rank.copied),
                tuple([(n, step - base) for n, step in book.promised.items()]),
                tuple([(n, step - base) for n, step in book.due.items()]),
                tuple([(n, outcome(known, n)) for n, known in book.known.items()]),
            ]
            if vote is not None:
                n, open_ = vote.layer, world.layers[vote.layer].decision is None
                mark.append((vote.phase, n, outcome(vote.outcome, n), open_ and outcome(vote._proposal, n)))
                mark.append(open_ and vote.promised is not None and vote.promised - base)
            if engine is not FORWARD:
                stands = engine._stands if engine.phase == "learn" else None
                mark.append((engine.phase, engine.layer, tuple(engine.due), outcome(stands, engine.layer)))
            ranks.append(tuple(mark))
        layers = []
        for n, layer in enumerate(world.layers):
            promise = tuple([at(step, n) for step in layer.promise]) if layer.decision is None else None
            after = None if layer.committed_after is None or steps[n] is None else layer.committed_after - base
            counts = (layer.landed, layer.landed_count, layer.promise_count, layer.ready)
            layers.append((counts, promise, outcome(layer.decision, n), layer.deleted, after))
        return tuple(ranks), tuple(layers), world.killed, world.worker_died

    def layer_base(self, world, number, base):
        """Return what a layer's steps are counted from; None when every rank is through with it."""
        bit, generation = 1 << number, number // self.case.layers
        for rank in world.ranks:
            known = rank.book.known.get(number)
            through = rank.generation > generation or (
                known is not None and (known.step is None or rank.committed & bit)
            )
            if rank.alive and not through:
                return base
        return None

    # --- what can happen next -----------------------------------------------------------------------------------------

    def steps(self, world):
        """Yield (text, rank, what to do to a copy, arguments) for everything that can happen next."""
        for number, rank in enumerate(world.ranks):
            if not rank.alive:
                continue
            if self.case.kill and not world.killed:
                yield "is killed", number, self.kill, ()
            if rank.rebuilt:
                continue
            if world.killed:
                yield "rebuilds", number, self.rebuild, ()
            yield from self.engine_steps(world, number, rank)
            waiting = rank.committed & ~rank.copied
            if waiting:
                layer = (waiting & -waiting).bit_length() - 1
                yield f"its device has copied layer {layer}", number, self.finish_copies, (layer,)
            if rank.worker_dead:
                continue
            if self.case.worker_dies and not world.worker_died:
                yield "its worker dies", number, self.worker_dies, ()
            yield from self.worker_steps(world, number, rank)

    def engine_steps(self, world, number, rank):
        engine = rank.engine
        if engine is FORWARD:  # an all-to-all in each: it ends when every rank has begun it
            mine = self.passes_begun(rank, number)
            if all(peer.alive and self.passes_begun(peer, n) >= mine for n, peer in enumerate(world.ranks)):
                yield "enters step()", number, self.enter, ()
            return
        operation = engine.operation()
        if operation is None:
            yield f"commits {engine.due} and leaves step()", number, self.leave, ()
        elif operation.verb == "pause":
            if rank.book.promised.get(engine.layer, rank.book.step + 1) > rank.book.step:
                yield "wakes", number, self.engine_takes, (False,)
            elif self.case.times_out or rank.worker_dead:
                yield f"gives up waiting for layer {engine.layer}", number, self.engine_takes, (True,)
        elif operation.verb == "put":
            yield f"settles layer {engine.layer}", number, self.engine_puts, (operation.value,)
        else:
            yield f"engine: {engine.phase}", number, self.engine_takes, (None,)

    def passes_begun(self, rank, number):
        return rank.book.step - self.offset(number) + (1 if rank.engine is FORWARD else 0)

    def worker_steps(self, world, number, rank):
        generation, peers = rank.generation, [peer for peer in world.ranks if peer.alive]
        if generation == self.case.generations:
            return
        if rank.agreed == generation:
            if self.rules.agree_waits_for_copies and (rank.book.due or rank.committed != rank.copied):
                return
            yield f"agrees to generation {generation}", number, self.agree, ()
        elif any(peer.agreed <= generation for peer in peers):
            return
        elif rank.vote is not None:
            yield from self.vote_steps(world, number, rank)
        elif rank.place == len(self.moves[number][generation]):
            yield f"ends generation {generation}", number, self.end, ()
        else:
            verb, layer = self.moves[number][generation][rank.place]
            bit, stands = 1 << layer, world.layers[layer].decision
            if verb == "start":
                yield f"starts layer {layer}", number, self.begin_transfer, (layer,)
            elif verb == "land":
                idle = rank.engine is not FORWARD or not self.rules.landing_waits_for_device
                if idle and all(peer.started & bit for peer in peers):  # rows come from those who have started
                    yield f"lands layer {layer}", number, self.land, (layer,)
                if self.case.times_out or world.killed or (stands is not None and stands.step is None):
                    yield f"gives layer {layer} up", number, self.open_vote, (layer, True)
            elif verb == "await copies":
                if rank.copied & bit or not self.is_due(rank, layer):
                    yield f"has seen the copies of layer {layer}", number, self.move_on, ()
            elif verb == "await slots":
                if all(peer.place >= rank.place for peer in peers) or (stands is not None and stands.step is None):
                    yield f"may start layer {layer}", number, self.move_on, ()
            else:
                yield f"votes on layer {layer}", number, self.open_vote, (layer, False)

    @staticmethod
    def is_due(rank, layer):
        return layer not in rank.book.known or rank.book.known[layer].step is not None

    def vote_steps(self, world, number, rank):
        vote = rank.vote
        operation, stored = vote.operation(), world.layers[vote.layer]
        if operation is None:
            yield f"has done with layer {vote.layer}", number, self.close_vote, ()
            return
        text = f"worker: {vote.phase} {vote.layer}"
        if operation.verb != "pause":
            if vote.phase not in ("look", "look_ready", "look_decision") or self.finds_something(vote, stored):
                yield text, number, self.vote_executes, (operation,)
        elif operation.topic == "next transfer":  # of a rule that is out
            busy = self.rules.landing_waits_for_device and rank.engine is FORWARD
            yield from [] if busy else [(text, number, self.vote_takes, (None,))]
        if vote.phase.startswith(("look", "wait")) and (self.case.times_out or world.killed):
            yield f"worker: gives layer {vote.layer} up", number, self.vote_fails, ()

    @staticmethod
    def finds_something(vote, stored):
        """Polling in vain changes nothing, so it is left out."""
        return stored.decision is not None or (stored.ready and vote.phase != "look_decision")

    # --- doing it, to a copy ------------------------------------------------------------------------------------------

    def kill(self, world, rank, number):
        rank.alive, world.killed = False, True

    def worker_dies(self, world, rank, number):
        rank.worker_dead = world.worker_died = True

    def rebuild(self, world, rank, number):
        """What a rebuild does on a survivor: settle the layer in doubt, apply every commit that stands."""
        vote, book = rank.vote, rank.book
        if self.rules.rebuild_settles and vote is not None and vote.layer not in book.known:
            stands = vote.outcome or self.put(world, vote.layer, Outcome(None, number))
            if stands.step is not None:
                book.due[vote.layer] = stands.step
        if self.rules.rebuild_settles:
            for layer in list(book.due):
                self.commit(world, rank, number, layer)
        rank.copied, rank.rebuilt, rank.vote = rank.committed, True, None
        book.due.clear()
        survivors = [peer for peer in world.ranks if peer.alive]
        if all(peer.rebuilt for peer in survivors) and len({peer.committed for peer in survivors}) > 1:
            raise Violation("the survivors hold different placements after the rebuild")

    def enter(self, world, rank, number):
        rank.engine = self.rules.engine(rank.book, number)
        rank.engine.take()

    def engine_takes(self, world, rank, number, result):
        rank.engine.take(result)

    def engine_puts(self, world, rank, number, outcome):
        rank.engine.take(self.put(world, rank.engine.layer, outcome))

    def leave(self, world, rank, number):
        for layer in rank.engine.due:
            self.commit(world, rank, number, layer)
            self.note_pass(world, rank, number, layer)
        for layer, stored in enumerate(world.layers):
            due = None if stored.decision is None else stored.decision.step
            if due is not None and due <= rank.book.step and not rank.committed >> layer & 1:
                raise Violation(f"rank {number} leaves step {rank.book.step} without layer {layer}, due in {due}")
        rank.engine = FORWARD

    def commit(self, world, rank, number, layer):
        for other, peer in enumerate(world.ranks):
            if peer.alive and not peer.landed >> layer & 1:
                raise Violation(f"rank {number} commits layer {layer} before rank {other} has its rows")
        rank.committed |= 1 << layer
        rank.book.committed(layer)

    def note_pass(self, world, rank, number, layer):
        stored, here = world.layers[layer], self.passes_begun(rank, number)
        if stored.committed_after not in (None, here):
            raise Violation(f"layer {layer} is committed after pass {stored.committed_after} and after pass {here}")
        world.layers[layer] = replace(stored, committed_after=here)

    def finish_copies(self, world, rank, number, layer):
        rank.copied |= 1 << layer

    def agree(self, world, rank, number):
        generation = rank.generation
        rank.agreed += 1
        if all(peer.agreed > generation for peer in world.ranks if peer.alive):
            for layer in range(generation * self.case.layers):
                world.layers[layer] = replace(world.layers[layer], deleted=True)

    def end(self, world, rank, number):
        rank.generation, rank.place = rank.generation + 1, 0
        rank.book.forget()

    def begin_transfer(self, world, rank, number, layer):
        """Landing memory is the layer's before the last but one, and rows are read where commits have copied."""
        per, generation, slots = self.case.layers, rank.generation, self.case.slots
        for before in (n for n in range(layer) if n % per % slots == layer % per % slots):
            if (rank.committed & ~rank.copied) >> before & 1 or before in rank.book.due:
                raise Violation(f"rank {number} lands layer {layer} where layer {before} is yet to be copied")
            if before // per == generation and before not in rank.book.known:
                raise Violation(f"rank {number} lands layer {layer} where layer {before} is yet to be decided")
        for other, peer in enumerate(world.ranks):
            for before in range(layer % per, generation * per, per):
                if peer.alive and ((peer.committed & ~peer.copied) >> before & 1 or before in peer.book.due):
                    raise Violation(f"rank {number} reads layer {layer} at rank {other} before its copies of {before}")
            if peer.committed >> layer & 1:
                raise Violation(f"rank {number} reads layer {layer} at rank {other}, which has committed it")
        rank.started |= 1 << layer
        rank.place += 1

    def land(self, world, rank, number, layer):
        rank.landed |= 1 << layer
        rank.place += 1

    def move_on(self, world, rank, number):
        rank.place += 1

    def open_vote(self, world, rank, number, layer, fails):
        rank.vote = self.rules.vote(rank.book, layer, number, range(self.case.ranks), True)
        if fails:
            rank.vote.fail()

    def vote_takes(self, world, rank, number, result):
        rank.vote.take(result)

    def vote_fails(self, world, rank, number):
        rank.vote.fail()

    def vote_executes(self, world, rank, number, operation):
        rank.vote.take(self.execute(world, rank.vote.layer, number, operation))
        if not self.rules.keys_outlive_generation and number == 0 and rank.vote.phase == "over":
            stands = rank.vote.outcome  # what an outcome known here leaves of it
            if stands.step is not None:
                world.layers[rank.vote.layer] = replace(world.layers[rank.vote.layer], decision=None)

    def close_vote(self, world, rank, number):
        outcome, rank.vote = rank.vote.outcome, None
        if outcome.step is not None:
            rank.place += 1
            return
        rank.place = len(self.moves[number][rank.generation])  # the rest is not moved
        first = rank.generation * self.case.layers
        for layer in range(first, first + self.case.layers):
            rank.book.known.setdefault(layer, Outcome(None, number))

    def execute(self, world, layer, number, operation):
        verb, topic, value = operation
        stored = world.layers[layer]
        if verb != "book" and stored.deleted:
            raise Violation(f"rank {number} asks for a key of layer {layer} that is deleted")
        if verb == "set":
            before = getattr(stored, topic)
            new = True if topic == "ready" else (*before[:number], value, *before[number + 1 :])
            world.layers[layer] = replace(stored, **{topic: new})
            return None
        if verb == "add":
            count = getattr(stored, f"{topic}_count") + 1
            world.layers[layer] = replace(stored, **{f"{topic}_count": count})
            return count
        if verb == "read":
            return getattr(stored, topic) or None
        if verb == "read all":
            return {rank: value for rank, value in enumerate(getattr(stored, topic)) if value is not None}
        return self.put(world, layer, value) if verb == "put" else None

    def put(self, world, layer, value):
        stored = world.layers[layer]
        if stored.decision is None or not self.rules.put_compares:
            stored = world.layers[layer] = replace(stored, decision=Outcome(value.step, value.by))
        return stored.decision

    # --- what must hold at all times ----------------------------------------------------------------------------------

    def check(self, world):
        for layer in range(self.count):
            known = {rank.book.known[layer].step for rank in world.ranks if rank.alive and layer in rank.book.known}
            if len(known) > 1:
                raise Violation(f"ranks disagree on layer {layer}: {sorted(known, key=str)}")
        for number, rank in enumerate(world.ranks if not self.rules.engines_may_wait_for_rows else ()):
            engine = rank.engine
            if rank.alive and engine is not FORWARD and engine.phase == "wait" and engine.layer in rank.book.promised:
                for other, peer in enumerate(world.ranks):
                    if peer.alive and not peer.landed >> engine.layer & 1:
                        raise Violation(f"engine {number} waits while rank {other} still moves layer {engine.layer}")
