"""Arrivals, cancels, streams and ends of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.core.contract.commands import FinishRequest, RejectRequest, Step, StreamTokens
from lockstep.core.contract.events import (
    DROP_OUTPUT,
    CancelMany,
    Grammar,
    Observed,
    PrefillCompleted,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestQueued,
    RequestRejected,
    TokenRuns,
    TurnStarted,
)
from lockstep.core.contract.samples import sample_count
from tests.support.driver.actions import STOP_TOKEN, output_token
from tests.support.driver.control import ControlPiece
from tests.support.driver.piece import Piece, RequestRecord, Subject


class RequestPiece(Piece):
    """Requests from arrival to end, as their clients see them."""

    def __init__(self, subject: Subject, control: ControlPiece) -> None:
        super().__init__(subject)
        self.control = control
        self.left: set[int] = set()  # requests that their client cancelled

    def actions(self) -> dict[str, Callable[..., None]]:
        return {
            "arrive": self.arrive,
            "cancel": self.cancel,
            "cancel_again": self.cancel_again,
            "cancel_many": self.cancel_many,
        }

    def arrive(self, base: int, tokens: int, max_new: int, options: dict[str, Any]) -> None:
        """A request arrives: `tokens` token ids from `base` on. Options are fields of RequestArrived, and some more."""
        subject, engine = self.subject, self.engine
        request_id = engine.last_request_id + 1
        options = dict(options)
        stops_at = options.pop("stops_at", None)
        deadline = options.pop("deadline_in_us", None)
        if deadline is not None:
            options["deadline_us"] = subject.now_us + deadline
        finish_by = options.pop("finish_in_us", None)
        if finish_by is not None:
            options["finish_by_us"] = subject.now_us + finish_by
        start = options.get("session_start")
        if start not in (None, DROP_OUTPUT) and options["session"] in engine.sessions.open:
            options["session_start"] = start % (engine.sessions.open[options["session"]].length + 1)
        eos = () if options.get("ignore_eos") else engine.config.eos_token_ids
        heeds_stop = STOP_TOKEN in (*eos, *options.get("stop_token_ids", ()))
        min_new = options.get("min_new_tokens", 0)
        grammar, ends = options.pop("grammar", ""), options.pop("grammar_ends", None)
        if grammar:
            options["grammar"] = Grammar("regex", grammar, grammar.encode())
        watches_text = "stop_texts" in options
        prompt = TokenRuns((base, tokens) if tokens else ())
        event = RequestArrived(
            time_us=subject.now_us, request_id=request_id, prompt=prompt, max_new_tokens=max_new, **options
        )
        for number in range(sample_count(event)):
            subject.records[request_id + number] = RequestRecord(
                tokens, max_new, stops_at, heeds_stop, min_new, grammar, ends, watches_text
            )
        subject.fold(event)
        for number in range(sample_count(event)):
            if request_id + number in subject.kv.stories:
                subject.kv.stories[request_id + number].grammar_ends = ends

    def cancel(self, choice: int) -> None:
        """The client of a live request cancels it."""
        engine, live = self.engine, list(self.engine.requests)
        if live:
            request = engine.requests[live[choice % len(live)]]
            held, grammar = request.request_id in engine.blocked, request.grammar
            if grammar is not None and request.request_id in engine.grammars.known[grammar.digest].waiting:
                self.mark("grammar cancelled while compiling")
            self.mark("cancelled while waiting for prerequisites" if held else f"cancelled while {request.state.name}")
            self.left.add(request.request_id)
            self.subject.fold(RequestCancelled(self.subject.now_us, request.request_id))

    def cancel_again(self, choice: int) -> None:
        """A late cancel: the request has ended, or never existed."""
        ended = [request_id for request_id in self.subject.records if request_id not in self.engine.requests]
        late = ended[choice % len(ended)] if ended else 10**9
        self.subject.fold(RequestCancelled(self.subject.now_us, late))

    def cancel_many(self, choice: int) -> None:
        """Two live requests and one that does not exist are cancelled by a control."""
        live = list(self.engine.requests)
        ids = [live[(choice + i) % len(live)] for i in range(2)] if live else []
        self.left |= set(ids)
        self.control.ask(CancelMany((*ids, 10**9)))

    # ---------------------------------------------------------------------------------------------------------- checks

    def decided(self) -> dict[type, Callable[[Any, Step], None]]:
        return {
            RequestQueued: self._queued,
            TurnStarted: self._turn_started,
            RequestRejected: self._rejected,
            RequestFinished: self._finished,
        }

    def _queued(self, event: RequestQueued, step: Step) -> None:
        self.subject.records[event.request_id].prompt_tokens = event.prompt_tokens
        if event.truncated_tokens:
            self.mark("prompt truncated")

    def _turn_started(self, event: TurnStarted, step: Step) -> None:
        record = self.subject.records[event.request_id]
        record.prompt_tokens, record.max_new_tokens = event.prompt_tokens, event.max_new_tokens

    def _rejected(self, event: RequestRejected, step: Step) -> None:
        self.mark(f"rejected ({event.reason})")

    def _finished(self, event: RequestFinished, step: Step) -> None:
        self.mark(f"finished ({event.reason})")

    def commands(self) -> dict[type, Callable[[Any], None]]:
        return {
            StreamTokens: self._streamed,
            FinishRequest: lambda command: self._ended(command.request_id, command.reason, command.output_tokens),
            RejectRequest: lambda command: self._ended(command.request_id, "rejected", 0),
        }

    def _streamed(self, command: StreamTokens) -> None:
        """S20: in order, no gap, no duplicate, and exactly the tokens of the request."""
        at = 0
        for request_id, offset, count in zip(
            command.request_ids.tolist(), command.offsets.tolist(), command.token_counts.tolist(), strict=True
        ):
            record = self.subject.records[request_id]
            assert not record.ended, f"r{request_id} got tokens after its end"
            assert offset == len(record.sent), f"r{request_id} got output {offset} after {len(record.sent)}"
            tokens = command.tokens[at : at + count].tolist()
            expected = [output_token(request_id, offset + i, record.stops_at) for i in range(count)]
            assert tokens == expected, f"r{request_id} got {tokens} at {offset}, its tokens are {expected}"
            record.sent += tokens
            at += count

    def _ended(self, request_id: int, reason: str, outputs: int) -> None:
        """S16: once, and every output was sent before."""
        record = self.subject.records[request_id]
        assert not record.ended, f"r{request_id} ended twice: {record.ended}, {reason}"
        record.ended = reason
        if request_id not in self.left:  # a cancelled request may miss tokens
            assert len(record.sent) == outputs, f"r{request_id} ended with {outputs} outputs, {len(record.sent)} sent"
        config = self.engine.config
        pool = config.pages * config.page_size + (not config.block_tokens)
        room = min(config.context_tokens_max, pool) - record.prompt_tokens
        most = min(record.max_new_tokens, room)
        if reason in ("stop", "text_stop"):  # a grammar's end does not wait for `min_new_tokens`
            least = min(record.min_new, most)
            assert outputs >= least, f"r{request_id} ended by {reason} with {outputs} of {least} tokens"
        if reason == "stop":
            assert record.sent[-1] == STOP_TOKEN
            assert record.heeds_stop
        if reason == "length":
            assert outputs == most, f"S36: r{request_id} ended with {outputs} outputs, of {most}"
        if reason == "length" and record.heeds_stop and record.stops_at is not None:
            if record.stops_at >= record.min_new:
                assert outputs <= record.stops_at, f"r{request_id} ran past its stop token"
        if record.grammar and record.grammar_ends is not None and reason in ("length", "grammar"):
            ended = outputs == record.grammar_ends if reason == "grammar" else outputs < record.grammar_ends
            assert ended, f"S22: r{request_id} ended by {reason} after {outputs}, its grammar {record.grammar_ends}"

    def _due_times_are_set(self, event: RequestArrived) -> None:
        config = self.engine.config

        def due(given: int | None, timeout_us: int | None) -> int | None:
            return given if given is not None or timeout_us is None else event.time_us + timeout_us

        for request in self.engine.requests.values():
            if event.request_id <= request.request_id < event.request_id + sample_count(event):
                assert request.deadline_us == due(event.deadline_us, config.waiting_timeout_us), request.name
                assert request.finish_by_us == due(event.finish_by_us, config.running_timeout_us), request.name
                if event.grammar is not None and config.grammar_timeout_us is not None:
                    is_compiled = self.engine.grammars.known[event.grammar.digest].error is not None
                    assert is_compiled or request.grammar_due_us == event.time_us + config.grammar_timeout_us

    def checked(self, event: Observed, step: Step) -> None:
        """The due times of a new request are those of its event, or follow from the settings."""
        if isinstance(event, RequestArrived):
            self._due_times_are_set(event)
        for request in self.engine.blocked.values():
            if request.open_prerequisites > 1:
                self.mark("several prerequisites")
            if request.session and request.extras is not None and request.extras.awaits_media:
                self.mark("turn waits for its media")

    def at_rest(self) -> None:
        unended = [request_id for request_id, record in self.subject.records.items() if not record.ended]
        assert not unended, f"L1: no terminal event for {unended}"


class SamplePiece(Piece):
    """Parallel samples: which wait for the prompt of their leader, and which sample leads when the leader has left."""

    def before(self, event: Observed) -> None:
        waiting = self.engine.prerequisites.waiting_samples.items()
        self._waiting = {leader: [one.request_id for one in samples] for leader, samples in waiting}

    def joined_behind(self, step: Step) -> list[int]:
        """Samples that join the waiting queue behind admission: their leader's prompt is launched, or was computed."""
        done = [event.request_id for event in step.decided if isinstance(event, PrefillCompleted)]
        return [sample for leader in done for sample in self._waiting.get(leader, ())]

    def checked(self, event: Observed, step: Step) -> None:
        if self._waiting:
            for leader in self._waiting.keys() - self.engine.prerequisites.waiting_samples.keys():
                self.mark("samples follow" if leader in self.engine.requests else "another sample leads")
