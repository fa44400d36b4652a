"""A copy of a journal without the content of one tenant: `lockstep journal forget RUN --tenant NAME --out DIR`.

The core compares token ids in two places only: prefixes in the radix cache, and stop tokens. So token id i of a prompt
or an answer becomes a keyed hash of ids 0 to i, which keeps equal prefixes equal, and a stop token stays as it is. The
key is drawn at random and is not stored. Texts (labels, stop texts, sources of grammars) and logprobs of these requests
are left out. All other records are as they were, and every decision of the copy is compared with the journal's, digest
by digest: the copy replays, verifies and explains like the journal.

Answers that a server stored beside its journal (`answers/`) are copied, except those of the tenant: its folders, and
its rows in the files of SQLite, which are rebuilt without them.

A copy is refused where a decision would differ: where tenants share prefixes, a prompt repeats the tokens of a session,
or KV is known by a hash of its content (media, storage below the cache). A journal whose first segments have expired
begins at a snapshot, which holds tokens, and is refused, too.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from hashlib import blake2b
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from lockstep.core.contract.events import (
    BatchFinished,
    ObservedEvent,
    RequestArrived,
    RequestId,
    TokenDigest,
    TokenIds,
    TokensForced,
)
from lockstep.core.contract.samples import sample_count
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import EventRecord, JournalError, UnsealedRecord
from lockstep.core.journal.replay import refuse_unreplayable
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.requests.delivery import accepted_counts
from lockstep.core.requests.table import prompt_bytes
from lockstep.core.scheduler.engine import Engine
from lockstep.host.answer_folders import ANSWERS, tenant_folder
from lockstep.host.batches import sampled_spans

STATE_BYTES = 16
MARK = 1 << 30
"""Set in every pseudonym and in no token id: a pseudonym never equals a stop token."""


class Redaction:
    """Replaces what a tenant's requests said. Events are passed in order, each before the engine steps it."""

    def __init__(self, engine: Engine, tenant: str) -> None:
        self.requests = 0  # of the tenant
        self._engine, self._tenant = engine, tenant
        self._key = os.urandom(32)
        self._states: dict[RequestId, list[bytes]] = {}  # of the tenant's requests: behind the prompt, each output
        self._stops: dict[RequestId, frozenset[int]] = {}

    def of(self, event: ObservedEvent) -> ObservedEvent:
        """Return an event without the content of the tenant's requests."""
        match event:
            case RequestArrived() if event.tenant == self._tenant:
                return self._arrival(event)
            case BatchFinished() if event.tokens:
                return self._result(event)
            case TokensForced():
                return replace(event, forced=tuple(map(self._forced, event.forced)))
        return event

    def _arrival(self, event: RequestArrived) -> RequestArrived:
        self.requests += 1
        prompt, state = event.prompt, bytes(STATE_BYTES)
        if not isinstance(prompt, TokenDigest):
            ids, states = self._chain(np.frombuffer(prompt_bytes(prompt), np.int32).tolist(), state, frozenset())
            prompt, state = TokenIds(np.array(ids, np.int32).tobytes()), states[-1] if states else state
        eos = () if event.ignore_eos else self._engine.config.eos_token_ids
        for number in range(sample_count(event)):
            self._states[event.request_id + number] = [state]
            self._stops[event.request_id + number] = frozenset((*event.stop_token_ids, *eos))
        grammar = None if event.grammar is None else replace(event.grammar, source="")
        stops = tuple([f"stop {number}" for number in range(len(event.stop_texts))])
        regexes = tuple([f"stop {number}" for number in range(len(event.stop_regexes))])
        label = self._name(event.label) if event.session else ""  # a later turn may name it
        after = self._name(event.session_after)
        event = replace(event, prompt=prompt, label=label, session_after=after)
        return replace(event, stop_texts=stops, stop_regexes=regexes, grammar=grammar)

    def _name(self, text: str) -> str:
        """Return a keyed hash in place of a client's name; "" for none."""
        return blake2b(text.encode(), digest_size=STATE_BYTES, key=self._key).hexdigest() if text else ""

    def _result(self, event: BatchFinished) -> BatchFinished:
        if not (flying := self._engine.in_flight):
            return event
        batch = next((one for one in flying if one.plan.batch_id == event.batch_id), flying[0])  # of either stream
        plan = batch.plan
        accepted = accepted_counts(event, len(plan.sample_rows))
        positions, counts = sampled_spans(self._engine, plan, accepted)
        tokens = np.frombuffer(event.tokens, np.int32).copy()
        mine = np.zeros(len(tokens), np.bool_)
        at = 0
        for request_id, position, count in zip(
            batch.samplers.request_ids.tolist(), positions.tolist(), counts.tolist(), strict=True
        ):
            states, stop = self._states.get(request_id), at + count
            if states is not None:
                request = self._engine.requests.get(request_id)
                first = len(states) - 1 if request is None else position - request.prompt_tokens
                found, new = self._chain(tokens[at:stop].tolist(), states[first], self._stops[request_id])
                tokens[at:stop], mine[at:stop] = found, True
                states[first + 1 :] = new
            at = stop
        changed = {"tokens": tokens.tobytes()}
        for name in ("logprobs", "top_ids", "top_logprobs"):
            if values := getattr(event, name):
                rows = np.frombuffer(values, np.int32).reshape(len(tokens), -1).copy()
                rows[mine] = 0
                changed[name] = rows.tobytes()
        return replace(event, **changed)

    def _forced(self, forced: tuple[RequestId, int, bytes]) -> tuple[RequestId, int, bytes]:
        request_id, first, ids = forced
        states = self._states.get(request_id)
        if states is None:
            return forced
        found, _ = self._chain(np.frombuffer(ids, np.int32).tolist(), states[first], self._stops[request_id])
        return request_id, first, np.array(found, np.int32).tobytes()

    def _chain(self, tokens: list[int], state: bytes, stops: frozenset[int]) -> tuple[list[int], list[bytes]]:
        """Return pseudonyms, and the state behind each token. Tokens in `stops` stay as they are."""
        found, states = [], []
        for token in tokens:
            state = blake2b(state + token.to_bytes(4, "little"), key=self._key, digest_size=STATE_BYTES).digest()
            states.append(state)
            found.append(token if token in stops else MARK | int.from_bytes(state[:4], "little") & (MARK - 1))
        return found, states


def forget_answers(source: Path, tenant: str | None, out: Path) -> int:
    """Copy a server's stored answers without those of a tenant. Returns how many files and rows are left out.

    Args:
        source, out: `answers` in the run folder of the journal and of its copy. `out` does not exist.
        tenant: None: nothing is left out.
    """
    left_out, of_tenant = 0, None if tenant is None else tenant_folder(tenant)
    out.mkdir(mode=0o700)
    for path in sorted(source.iterdir()):
        copy = out / path.name
        if path.is_symlink() or path.suffix == ".lock" or path.name.endswith(("-wal", "-shm")):
            continue
        if path.is_dir():
            if path.name == of_tenant:
                left_out += sum(one.is_file() for one in path.rglob("*"))
            else:
                left_out += forget_answers(path, tenant, copy)
        elif path.suffix == ".sqlite":
            left_out += _rows_left_out(path, tenant, copy)
        else:
            copy.touch(0o600)
            shutil.copyfile(path, copy)
    return left_out


def _rows_left_out(path: Path, tenant: str | None, copy: Path) -> int:
    """Copy a file of SQLite without the rows of a tenant, in every table with a column `tenant`. Returns their number.

    With `tenant` None it is copied whole.
    Raises: JournalError.
    """
    copy.touch(0o600)
    try:
        with (
            closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(copy)) as base,
        ):
            source.backup(base)
            count = 0
            tables = base.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            for (table,) in tables if tenant is not None else ():
                if "tenant" in {row[1] for row in base.execute(f'PRAGMA table_info("{table}")')}:
                    count += base.execute(f'DELETE FROM "{table}" WHERE tenant = ?', (tenant,)).rowcount
            base.commit()
            base.execute("VACUUM")
    except sqlite3.Error as error:
        raise JournalError(f"{path} cannot be read: {error}") from error
    return count


def forget(run: Path, tenant: str, out: Path) -> int:
    """Write a copy of a journal without the content of a tenant's requests. Returns the number of these requests.

    Stored answers are copied by `forget_answers`.

    Raises: JournalError if the copy would decide otherwise, or cannot be made; then `out` does not exist.
    """
    if out.exists() and any(out.iterdir()):
        raise JournalError(f"{out} is not empty\nhint: give a new folder")
    journal = read_journal(run)
    refuse_unreplayable(journal.header)
    if journal.first_step:
        raise JournalError(
            f"the first {journal.first_step} events of {run} have expired, and the snapshot behind them holds tokens\n"
            "hint: let the journal expire by --journal-age-s, or delete the run"
        )
    engine = Engine(journal.header.config)
    redaction = Redaction(engine, tenant)
    try:
        writer = JournalWriter.create(out, journal.header)
        for record in journal.records():
            if isinstance(record, EventRecord):
                event = redaction.of(record.event)
                digest = engine.step(event).digest
                if digest != record.digest:
                    raise JournalError(
                        f"event {record.step} is decided otherwise without the tokens of tenant {tenant!r}: other "
                        "tenants share its prefixes, a prompt repeats a session's, or KV is known by its content\n"
                        "hint: only a journal of tenants that share no prefixes (isolate_tenants) can be copied"
                    )
                writer.append(event, digest)
            elif isinstance(record, UnsealedRecord):
                writer.append_unsealed(redaction.of(record.event))
        writer.close()
        answers = forget_answers(run / ANSWERS, tenant, out / ANSWERS) if (run / ANSWERS).is_dir() else 0
        if not redaction.requests and not answers:
            raise JournalError(
                f"{run} has no request and no stored answer of tenant {tenant!r}\n"
                "hint: a tenant is named in the file of keys; without keys it is the empty name"
            )
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return redaction.requests
