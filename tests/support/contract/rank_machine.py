"""Rounds of data-parallel ranks, as section 8 of docs/contract.md has them.

    rank: slot ──> propose ──> hub, once all have proposed ──> agreed, to every rank ──> launch, on all or on none
                        └── the first proposal of a round makes the other hosts offer a slot

A pass is a collective: it ends once every rank has launched its part. What a rank proposes is free within the rules:
the new tokens of its part, 0 for none. Ghosts: the passes that each rank has launched, with the parts of all.

    ("fold", rank, event, commands)     an event and the Step of one rank
    ("lost",)                           a rank or its device is lost, so that passes may never end
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from tests.support.contract.machine import Machine
from tests.support.driver.actions import Action
from tests.support.explorer.world import Left, Move

Counts = tuple[int, ...]


class Pass(NamedTuple):
    """A rank's part of a collective."""

    round: int
    own: int  # new tokens that this rank runs
    counts: Counts  # new tokens of each rank, as it was agreed


class RankView(NamedTuple):
    """One rank: its core and its host."""

    work: int = 0  # passes that its requests need
    generation: int = 0
    round: int = 0  # that it proposes next
    proposed: int | None = None  # new tokens; None: nothing is proposed
    agreed: tuple[tuple[int, Counts, int], ...] = ()  # on the way to it: round, new tokens, generation
    passes: tuple[Pass, ...] = ()  # launched, and not ended on all ranks
    delivered: int = 0  # of these
    news: bool = True  # no round in which all were empty is behind it, or a fact was folded since it proposed
    wanted: bool = False  # another rank has proposed for this round
    decided: bool = False  # the ranks have decided together which of them extend, and proposed again


class RanksState(NamedTuple):
    """All ranks, and the proposals at the hub."""

    ranks: tuple[RankView, ...]
    proposals: tuple[int | None, ...]
    round: int = 0  # of these
    lost: bool = False
    fault: str = ""


class RankBounds(NamedTuple):
    """Sizes of a group, and what comes from outside while it is explored."""

    ranks: int = 2
    depth: int = 1
    work: int = 2  # passes of an arrival; 0: beside a product, whose own requests count
    inputs: tuple[tuple[str, int], ...] = (("arrivals", 2),)  # arrivals, cancels, errors, losses


class RankMachine(Machine):
    """A group of ranks."""

    rules: ClassVar[dict[str, str]] = {
        # of the hosts
        "joins a round": "a host that receives another rank's proposal offers a slot, with nothing to run, too",
        "quiet behind an empty round": "after a round in which all were empty, a host offers none until another fact",
        "the same on every rank": "RanksAgreed is the same on every rank",
        "agreements in order": "RanksAgreed of the round that was proposed, once",
        "own entry": "the entry of this rank equals its proposal",
        "agreements of a generation": "an agreement of an older generation is void",
        "passes end on all": "a collective ends once every rank has launched it",
        "all ranks restart": "if a rank raises or dies, all ranks restart",
        # of the cores
        "one proposal": "a proposal binds, so none follows before it is agreed on",
        "rounds count": "rounds count from 0 in every generation",
        "proposes in a slot": "LaneReady plans and returns ProposeBatch",
        "launches behind agreement": "RanksAgreed returns LaunchBatch, nothing else does",
        "launches on all or none": "on all ranks, mode idle with nothing to run, or on none; or another ProposeBatch",
        "a proposal binds": "its plan is in flight from then on, and nothing is undone",
        "names the pass": "the plan has the round and the parts of all ranks",
        "depth of ranks": "depth d allows d + 1 batches that are launched and not delivered",
    }

    def __init__(self, bounds: RankBounds, *, lax: str = "") -> None:
        super().__init__(lax=lax)
        self.bounds = bounds

    def first(self) -> RanksState:
        count = self.bounds.ranks
        return RanksState((RankView(),) * count, (None,) * count)

    def inputs(self) -> dict[str, int]:
        return dict(self.bounds.inputs)

    def is_idle(self, state: RanksState) -> bool:
        waits = any(one is not None for one in state.proposals)
        busy = any(one.work or one.proposed is not None or one.passes for one in state.ranks)
        due = any(generation == view.generation for view in state.ranks for *_, generation in view.agreed)
        return not waits and not busy and not due and not state.lost

    # --------------------------------------------------------------------------------------------------------- a step

    def after(self, state: RanksState, action: Action) -> RanksState:
        match action:
            case ("lost",):
                return state._replace(lost=True)
            case ("fold", rank, event, commands):
                return self._fold(state, rank, event, commands)
        raise ValueError(f"no step is named {action[0]}")

    def _fold(self, state: RanksState, rank: int, event: Action, commands: tuple[Action, ...]) -> RanksState:
        view, launches = state.ranks[rank], False
        bound = view.proposed
        if state.lost:
            self.need("all ranks restart", event[0] == "restart", f"{event} of rank {rank}")
        match event:
            case ("arrive", work):
                view = view._replace(work=view.work + work, news=True)
            case ("cancel",):
                view = view._replace(work=0, news=True)
            case ("fact",):
                view = view._replace(news=True)
            case ("slot",):
                self.need("quiet behind an empty round", view.news or view.wanted, f"rank {rank}")
                view = view._replace(wanted=False)
            case ("sleep",):
                has_slot = view.proposed is None and len(view.passes) - view.delivered <= self.bounds.depth
                self.need("joins a round", not (view.wanted and has_slot), f"rank {rank} waits, and others for it")
            case ("result", error):
                view = self._ended(state, rank, error)
            case ("agreed", number, counts, generation):
                view, launches = self._agree(state, rank, (number, counts, generation))
            case ("restart", generation):
                return self._restarted(state, rank, generation)
        state = state._replace(ranks=_put(state.ranks, rank, view))
        started = [command for command in commands if command[0] == "launch"]
        self.need("launches behind agreement", not started or event[0] == "agreed", f"rank {rank}: {event}, {commands}")
        again = any(command[0] == "propose" for command in commands)  # once all decided together which of them extend
        stays = launches and not started and not again
        self.need("launches on all or none", not stays, f"rank {rank} launches {started} behind {event}")
        is_void = event[0] == "agreed" and not launches and started
        self.need("launches on all or none", not is_void, f"rank {rank} launches {started} behind {event}")
        for command in commands:
            match command:
                case ("launch", number, own, counts):
                    state = self._launch(state, rank, Pass(number, own, counts), event, bound)
                case ("propose", number, tokens):
                    self.need("proposes in a slot", event[0] in ("slot", "agreed"), f"rank {rank}: {event}")
                    state = self._propose(state, rank, number, tokens)
                    if event[0] == "agreed":
                        state = state._replace(ranks=_put(state.ranks, rank, state.ranks[rank]._replace(decided=True)))
        return self._trimmed(state)

    def _propose(self, state: RanksState, rank: int, number: int, tokens: int) -> RanksState:
        view = state.ranks[rank]
        self.need("one proposal", view.proposed is None, f"rank {rank} proposes {number} and has proposed {view.round}")
        self.need("rounds count", number == view.round, f"rank {rank} proposes {number}, not {view.round}")
        self.need("depth of ranks", len(view.passes) - view.delivered <= self.bounds.depth, f"rank {rank}")
        if number != state.round:
            return state._replace(fault=state.fault or f"rank {rank} proposes {number}, all are at {state.round}")
        view = view._replace(proposed=tokens, round=number + 1, news=False)
        state = state._replace(ranks=_put(state.ranks, rank, view))
        proposals = _put(state.proposals, rank, tokens)
        if any(one is None for one in proposals):
            if sum(one is not None for one in proposals) == 1:
                wanted = [view._replace(wanted=i != rank or view.wanted) for i, view in enumerate(state.ranks)]
                state = state._replace(ranks=tuple(wanted))
            return state._replace(proposals=proposals)
        counts: Counts = tuple(one or 0 for one in proposals)
        ranks = [
            view._replace(agreed=(*view.agreed, (number, counts, view.generation)), wanted=False)
            for view in state.ranks
        ]
        return state._replace(ranks=tuple(ranks), proposals=(None,) * self.bounds.ranks, round=number + 1)

    def _agree(self, state: RanksState, rank: int, said: tuple[int, Counts, int]) -> tuple[RankView, bool]:
        view, (number, counts, generation) = state.ranks[rank], said
        rest = tuple(one for one in view.agreed if one != said)
        if generation < view.generation and self.lax != "agreements of a generation":
            return view._replace(agreed=rest), False
        self.need("agreements in order", number == view.round - 1 and view.proposed is not None, f"rank {rank}: {said}")
        self.need("own entry", counts[rank] == view.proposed, f"rank {rank}: {counts}, it proposed {view.proposed}")
        self.need("the same on every rank", said in view.agreed, f"rank {rank}: {said}, agreed are {view.agreed}")
        rest = view.agreed if self.lax == "agreements in order" else rest
        view = view._replace(news=view.news or view.decided, decided=False)
        return view._replace(agreed=rest, proposed=None, news=view.news or any(counts)), any(counts)

    def _launch(self, state: RanksState, rank: int, one: Pass, event: Action, bound: int | None) -> RanksState:
        view = state.ranks[rank]
        if event[0] == "agreed":
            self.need("a proposal binds", one.own == bound, f"rank {rank} runs {one}, proposed {bound}")
            self.need("names the pass", (one.round, one.counts) == event[1:3], f"rank {rank} runs {one} behind {event}")
        used = view.work - (one.own > 0)
        return state._replace(
            ranks=_put(state.ranks, rank, view._replace(passes=(*view.passes, one), work=max(used, 0)))
        )

    def _ended(self, state: RanksState, rank: int, error: bool) -> RankView:
        view = state.ranks[rank]
        is_done = all(len(other.passes) > view.delivered for other in state.ranks)
        self.need("passes end on all", is_done, f"rank {rank}")
        return view._replace(delivered=view.delivered + 1, news=True, work=0 if error else view.work)

    def _restarted(self, state: RanksState, rank: int, generation: int) -> RanksState:
        """One rank restarts; once all have, they meet at round 0."""
        work = sum(one.own > 0 for one in state.ranks[rank].passes[state.ranks[rank].delivered :])
        again = state.ranks[rank].work + work if self.bounds.work else 0
        view = RankView(again, generation, agreed=state.ranks[rank].agreed)
        state = state._replace(ranks=_put(state.ranks, rank, view))
        if self.lax == "all ranks restart":
            return state._replace(lost=False)
        others = [other for other in state.ranks if other.generation == generation]
        if len(others) == 1:
            state = state._replace(proposals=(None,) * self.bounds.ranks, round=0)
        return state._replace(lost=len(others) < len(state.ranks))

    def _trimmed(self, state: RanksState) -> RanksState:
        """Forget passes that ended on every rank."""
        ended = min(view.delivered for view in state.ranks)
        if not ended:
            return state
        fault = state.fault or self._unlike(state)
        ranks = [view._replace(passes=view.passes[ended:], delivered=view.delivered - ended) for view in state.ranks]
        return state._replace(ranks=tuple(ranks), fault=fault)

    # --------------------------------------------------------------------------------------------------------- safety

    def unsafe(self, state: RanksState) -> str:
        return state.fault or self._unlike(state)

    def _unlike(self, state: RanksState) -> str:
        """Ranks in one collective must run the same pass, each the part that was agreed on."""
        for number in range(max(len(view.passes) for view in state.ranks)):
            parts = [(i, view.passes[number]) for i, view in enumerate(state.ranks) if len(view.passes) > number]
            if len({(one.round, one.counts) for _, one in parts}) > 1:
                return f"ranks run different passes: {parts}"
            for rank, one in parts:
                if one.counts[rank] != one.own:
                    return f"rank {rank} runs {one.own} tokens, agreed are {one.counts}"
        return ""

    # ------------------------------------------------------------------------------------------------------ exploring

    def moves(self, state: RanksState, left: Left) -> Iterator[Move]:
        if left.has("losses") and not state.lost:
            yield Move(("lost",), "losses")
        for rank, view in enumerate(state.ranks):
            if state.lost:
                generation = max(one.generation for one in state.ranks)
                fresh = len({one.generation for one in state.ranks}) == 1
                if fresh or view.generation < generation:
                    yield Move(("fold", rank, ("restart", generation + fresh), ()))
                continue
            if left.has("arrivals"):
                yield Move(("fold", rank, ("arrive", self.bounds.work), ()), "arrivals")
            if left.has("cancels") and view.work:
                yield Move(("fold", rank, ("cancel",), ()), "cancels")
            yield from self._results(rank, view, left)
            yield from self._slots(state, rank, view)
            yield from self._agreements(rank, view)

    def _results(self, rank: int, view: RankView, left: Left) -> Iterator[Move]:
        if view.delivered < len(view.passes):
            yield Move(("fold", rank, ("result", False), ()))
            if left.has("errors"):
                yield Move(("fold", rank, ("result", True), ()), "errors")

    def _slots(self, state: RanksState, rank: int, view: RankView) -> Iterator[Move]:
        if self.lax == "joins a round" and not view.news:
            return  # a host that sleeps, whatever the others propose
        is_called = view.news or view.wanted or self.lax == "quiet behind an empty round"
        busy = view.proposed is not None and self.lax != "one proposal"
        if not is_called or busy or len(view.passes) - view.delivered > self.bounds.depth:
            return
        tokens = int(view.work > 0)
        if self.lax == "launches behind agreement" and tokens:
            launch = ("launch", view.round, 1, tuple(int(i == rank) for i in range(self.bounds.ranks)))
            yield Move(("fold", rank, ("slot",), (launch,)))
        number = view.round + (self.lax == "rounds count")
        yield Move(("fold", rank, ("slot",), (("propose", number, tokens),)))

    def _agreements(self, rank: int, view: RankView) -> Iterator[Move]:
        for number, counts, generation in view.agreed:
            event = ("agreed", number, counts, generation)
            if self.lax in ("the same on every rank", "own entry"):
                other = (*counts[:-1], counts[-1] + 1)
                launch = ("launch", number, view.proposed or 0, other)
                yield Move(("fold", rank, ("agreed", number, other, generation), (launch,)))
            if self.lax == "launches on all or none":
                yield Move(("fold", rank, event, ()))
            if self.lax == "a proposal binds":
                yield Move(("fold", rank, event, (("launch", number, int(view.work > 0), counts),)))
            if self.lax == "names the pass":
                yield Move(("fold", rank, event, (("launch", number + 1, view.proposed or 0, counts),)))
            launch = ("launch", number, view.proposed or 0, counts)
            is_void = generation < view.generation and self.lax != "agreements of a generation"
            yield Move(("fold", rank, event, (launch,) if any(counts) and not is_void else ()))

    def canonical(self, state: RanksState) -> object:
        """Count rounds from that of the hub back, and generations from the newest."""
        newest = max(view.generation for view in state.ranks)

        rounds = sorted({one.round for view in state.ranks for one in view.passes})
        order = {number: at for at, number in enumerate(rounds)}

        def passes(some: tuple[Pass, ...]) -> list[object]:
            return [(order[one.round], one.own, one.counts) for one in some]

        ranks = [
            (
                view.work,
                view.generation - newest,
                view.round - state.round,
                view.proposed,
                [(number - state.round, counts, generation - newest) for number, counts, generation in view.agreed],
                passes(view.passes),
                view.delivered,
                view.news,
                view.wanted,
                view.decided,
            )
            for view in state.ranks
        ]
        return ranks, state.proposals, state.lost, state.fault


def _put(values: tuple[Any, ...], number: int, value: Any) -> tuple[Any, ...]:
    return (*values[:number], value, *values[number + 1 :])
