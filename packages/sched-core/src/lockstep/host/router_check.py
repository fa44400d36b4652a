"""Checks of a router's journal: its replay, and a comparison with the journals of the engines.

A request that was sent to an engine is also in the engine's journal: in a simulation under the same request id. In a
server, each engine numbers its requests anew, so the numbers of requests are compared.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from lockstep.core.cluster.dispatch import DispatchConfig, Dispatcher, ProbeAnswered
from lockstep.core.cluster.router import EngineChanged, RequestOffered, RequestRouted, Router
from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import RequestArrived, RequestId
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import EndRecord, EventRecord, JournalError, Tail
from lockstep.host.host_header import SIMULATOR, HostHeader
from lockstep.host.router_journal import OwnIds, RouterHeader, RouterReader, RouterRecord, router_parts

SHOWN_MAX = 5  # requests in a message


class RouterDivergence(LockstepError):
    """The replay of a router's journal made another decision than the recorded one."""


class RouterVerified(NamedTuple):
    """What a replay of a router's journal found; all decisions are equal."""

    facts: int
    decisions: int
    tail: Tail | None  # None if there are only old files
    old_files: list[Path]  # JSON lines of an earlier version, which have no integrity


def verify_router(folder: Path) -> RouterVerified:
    """Replay the journal of a router, of all of its lives.

    Raises: RouterDivergence with the first record that differs; JournalCorrupt; JournalError for a file that cannot be
        read.
    """
    reader = RouterReader(folder)
    facts, decisions = 0, 0
    router: Router | Dispatcher | None = None
    for place, content in reader.entries():
        try:
            if isinstance(content, RouterHeader):
                router = _router_of(content)
                continue
            facts += 1
            assert router is not None, "entries begin with a header"
            decided = _step(router, content, place)
        except LockstepError as error:
            if isinstance(error, JournalError):
                raise
            raise RouterDivergence(f"{place}: the replay raised {type(error).__name__}: {error}") from error
        decisions += len(decided)
        recorded = content.decided if isinstance(router, Dispatcher) else _one(content.routed)
        if decided != recorded:
            raise RouterDivergence(f"{place}: recorded {_shown(content)}, replayed {_only(decided, router)}")
        if content.digest != router.digest.hex() and (content.digest or decided):
            raise RouterDivergence(f"{place}: recorded digest {content.digest}, replayed {router.digest.hex()}")
    if reader.cut:
        raise JournalError(reader.cut)
    return RouterVerified(facts, decisions, reader.tail, reader.old_files)


def _router_of(header: RouterHeader) -> Router | Dispatcher:
    if isinstance(header.dispatch, DispatchConfig):
        return Dispatcher(header.dispatch, header.router, header.engines)
    return Router(header.router, header.engines)


def _step(router: Router | Dispatcher, record: RouterRecord, place: str) -> tuple[RequestRouted, ...]:
    if isinstance(router, Dispatcher):
        return router.step(record.fact)
    if isinstance(record.fact, ProbeAnswered):
        raise JournalError(f"{place}: a router without a waiting queue receives no probes")
    return _one(router.step(record.fact))


def _one(routed: RequestRouted | None) -> tuple[RequestRouted, ...]:
    return () if routed is None else (routed,)


def _shown(record: RouterRecord) -> object:
    return record.decided or record.routed


def _only(decided: tuple[RequestRouted, ...], router: Router | Dispatcher) -> object:
    if isinstance(router, Dispatcher):
        return decided
    return decided[0] if decided else None


# -------------------------------------------------------------------------------------------- against engines' journals


class _Arrivals(NamedTuple):
    """The requests in the journal of one engine."""

    name: str  # of its folder
    role: str  # "prefill", "decode" or "mixed"
    is_simulated: bool
    is_closed: bool  # neither interrupted nor killed
    ids: Counter[RequestId]
    origins: int  # different ones


def compare_with_engines(run: Path) -> list[str]:
    """Compare which requests routers and engines of a cluster's run have; return the differences, in words.

    In a simulation every request of an engine must have been sent there, and the other way round if the run was not
    interrupted. In a server an engine must not have more requests than were sent there. It may have fewer: a client may
    leave before. Servers are not compared if segments of the router's journal have expired, or if an engine was drained
    in front of a waiting queue: then requests go to an engine past the router.
    Raises: JournalError, JournalCorrupt.
    """
    folders = sorted((path.parent for path in run.glob("engines/*/journal")), key=lambda path: int(path.name))
    engines = [_arrivals_of(folder) for folder in folders]
    parts = router_parts(run)
    found = []
    for part, role in zip(parts, ("prefill", "decode"), strict=False):
        own = [engine for engine in engines if len(parts) == 1 or engine.role == role]
        found += _differences(RouterReader(part), own)
    return found


def _arrivals_of(folder: Path) -> _Arrivals:
    journal = read_journal(folder)
    ids, origins, reason = Counter[RequestId](), set[str](), ""
    for record in journal.records():
        if isinstance(record, EventRecord) and isinstance(record.event, RequestArrived):
            ids[record.event.request_id] += 1
            origins.add(record.event.origin)
        elif isinstance(record, EndRecord):
            reason = record.reason
    is_closed = journal.tail.closed and reason == "closed"
    simulated = HostHeader.of(journal.header).kind == SIMULATOR
    return _Arrivals(folder.name, str(journal.header.config.role), simulated, is_closed, ids, len(origins))


def _differences(reader: RouterReader, engines: list[_Arrivals]) -> list[str]:
    sent, own_ids = [Counter[RequestId]() for _ in engines], OwnIds()
    has_queue, was_drained = False, False
    simulated = all(engine.is_simulated for engine in engines)
    openings: set[RequestId] = set()  # a session is opened by an offer without tokens: no request follows
    for place, content in reader.entries():
        if isinstance(content, RouterHeader):
            has_queue = has_queue or isinstance(content.dispatch, DispatchConfig)
            if len(content.engines) != len(engines):
                return [f"{place}: a router of {len(content.engines)} engines, but {len(engines)} have a journal"]
            continue
        fact = content.fact
        if isinstance(fact, RequestOffered) and not fact.prompt_tokens and not simulated:
            openings.add(fact.request_id)
        was_drained = was_drained or (isinstance(fact, EngineChanged) and fact.state == "draining")
        for engine, own_id, routed in own_ids.sent_by(content):
            if routed.request_id not in openings:
                sent[engine][own_id] += 1
    if not simulated:
        if reader.has_expired or (has_queue and was_drained):
            return []
        return [
            f"engine {engine.name} has {engine.origins:,} requests, the router sent {own.total():,} there"
            for engine, own in zip(engines, sent, strict=True)
            if engine.origins > own.total()
        ]
    found = []
    all_closed = all(engine.is_closed for engine in engines)
    for one, own in zip(engines, sent, strict=True):
        if unsent := sorted((one.ids - own).elements()):
            found.append(f"engine {one.name} has {_named(unsent)} that the router did not send there")
        if (lost := sorted((own - one.ids).elements())) and all_closed:
            found.append(f"the router sent {_named(lost)} to engine {one.name}, which does not have them")
    return found


def _named(ids: list[RequestId]) -> str:
    more = f" and {len(ids) - SHOWN_MAX:,} more" if len(ids) > SHOWN_MAX else ""
    return f"{len(ids):,} request{'' if len(ids) == 1 else 's'} ({', '.join(map(str, ids[:SHOWN_MAX]))}{more})"
