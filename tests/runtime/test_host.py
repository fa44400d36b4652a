"""The loop with a device: each request gets the answer that it would get alone."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")


from lockstep.core.contract.commands import (  # noqa: E402
    CancelTransfer,
    FinishRequest,
    RejectRequest,
    RowTaken,
)
from lockstep.core.contract.errors import ContractError  # noqa: E402
from lockstep.core.contract.events import (  # noqa: E402
    BatchFinished,
    GetState,
    Grammar,
    HostTimeClamped,
    LoadAdapterControl,
    MediaEncoded,
    Pause,
    PromptSpan,
    ReleaseMemory,
    RequestArrived,
    RequestFinished,
    RequestRetracted,
    SamplingParams,
    UpdateWeights,
)
from lockstep.core.journal.reader import read_journal  # noqa: E402
from lockstep.core.journal.records import JournalError, JournalHeader, UnsealedRecord  # noqa: E402
from lockstep.core.journal.replay import fold, replay  # noqa: E402
from lockstep.core.journal.writer import JournalWriter  # noqa: E402
from lockstep.host.errors import EngineStopped  # noqa: E402
from lockstep.host.handover.wire import PromptResults  # noqa: E402
from lockstep.host.loop import HostClock, Int32s  # noqa: E402
from lockstep.host.services import DeviceServices, RequestServices  # noqa: E402
from lockstep.host.sinks import ResultExtras, TokenLogprobs, UnsentOutput  # noqa: E402
from lockstep.runtime.errors import DeviceLost  # noqa: E402
from lockstep.runtime.overlap import CpuLane  # noqa: E402
from tests.support.live_server import until  # noqa: E402
from tests.support.small_runtime import (  # noqa: E402
    VOCABULARY,
    Answer,
    Ends,
    Foreseeing,
    SmallRuntime,
    alone,
    make_executor,
    next_token,
    request,
    small_config,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "microbatches": {"pp_size": 2, "overlap_depth": 1, "retract_every": 5},
    "microbatches, more than stages": {"pp_size": 2, "pp_async_batch_depth": 1, "overlap_depth": 0},
    "plain": {},
    "depth 0": {"overlap_depth": 0},
    "depth 2": {"overlap_depth": 2},
    "no cache": {"radix_cache": False},
    "shared in the same step": {"same_step_sharing": True},
    "mixed": {"batching": "mixed", "chunked_prefill_size": 8},
    "running first": {"batching": "running_first", "chunked_prefill_size": 8, "overlap_depth": 2},
    "retractions": {"retract_every": 3, "overlap_depth": 2},
    "short of pages": {"pages": 20, "reserve": "on_demand"},
    "several steps": {"decode_steps_per_launch": 3},
    "several steps, depth 0": {"decode_steps_per_launch": 4, "overlap_depth": 0, "retract_every": 2},
    "small pages": {"page_size": 1, "pages": 200, "chunked_prefill_size": 5},
}

STIRRED: dict[str, Any] = {"retract_every": 4, "overlap_depth": 1, "same_step_sharing": True, "batching": "mixed"}
RETRACTING = ("microbatches", "retractions", "short of pages", "several steps, depth 0")


def random_requests(seed: int, count: int) -> list[tuple[list[int], int]]:
    """Prompts that begin alike, in groups, and lengths."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(97) for _ in range(rng.randrange(20))] for _ in range(3)]
    return [
        (rng.choice(beginnings) + [rng.randrange(97) for _ in range(rng.randrange(1, 24))], rng.randrange(1, 20))
        for _ in range(count)
    ]


@pytest.mark.parametrize("run_at", ["launch", "collection"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_request_is_answered_as_if_it_were_alone(name: str, run_at: Any) -> None:
    runtime = SmallRuntime(run_at=run_at, eos_token_ids=(5,), **SETTINGS[name])
    requests = random_requests(len(name), 14)
    answers = [runtime.submit(prompt, count) for prompt, count in requests]
    runtime.run()
    for answer, (prompt, count) in zip(answers, requests, strict=True):
        assert answer.tokens == alone(prompt, count, stops=(5,))
        assert answer.reason == ("stop" if answer.tokens[-1] == 5 else "length")
    assert runtime.deepest == runtime.config.microbatches * (runtime.config.overlap_depth + 1)
    assert bool(runtime.decided(RequestRetracted)) == (name in RETRACTING)


def test_a_run_is_replayed_by_the_core_with_equal_digests(tmp_path: Path) -> None:
    header = JournalHeader(config=small_config(**STIRRED))
    with JournalWriter.create(tmp_path, header) as journal:
        runtime = SmallRuntime(journal=journal, **STIRRED)
        for prompt, count in random_requests(7, 12):
            runtime.submit(prompt, count)
        runtime.run()
    replayed = replay(tmp_path)
    assert replayed.digest == runtime.engine.digest
    assert replayed.batches == runtime.host.batches == len(runtime.plans)


def test_a_recorded_run_needs_no_scheduler(tmp_path: Path) -> None:
    """Its plans give the same tokens on another executor, batch by batch."""
    with JournalWriter.create(tmp_path, JournalHeader(config=small_config(**STIRRED))) as journal:
        runtime = SmallRuntime(journal=journal, **STIRRED)
        for prompt, count in random_requests(8, 12):
            runtime.submit(prompt, count)
        runtime.run()
    plans, results = [], {}
    for event, step in fold(tmp_path):
        plans += [plan] if (plan := step.launched()) is not None else []
        if isinstance(event, BatchFinished):
            results[event.batch_id] = event.tokens
    executor = make_executor(small_config(**STIRRED), CpuLane(HostClock()), canary=False)
    for plan in plans:
        executor.launch(plan)
    for plan in plans:
        assert executor.collect().tokens.tobytes() == results[plan.batch_id]
    assert len(plans) > 20


def test_time_is_held_when_the_clock_falls() -> None:
    ticks = iter([0, 5_000_000, 3_000_000, 4_000_000, 5_500_000])
    clock = HostClock(lambda: next(ticks))
    assert clock() == 5_000
    assert clock() == 5_000
    assert clock.clamped() == 2_000
    assert clock() == 5_000
    assert clock.clamped() == 0
    assert clock() == 5_500


def test_a_clock_that_fell_is_in_the_journal() -> None:
    now_ns = 10**9
    runtime = SmallRuntime(clock=HostClock(lambda: now_ns))
    now_ns += 10**6
    first = runtime.submit([1, 2, 3], 2)
    runtime.run()
    now_ns -= 10**5
    second = runtime.submit([1, 2, 4], 2)
    runtime.run()
    assert [event.back_us for event, _ in runtime.steps if isinstance(event, HostTimeClamped)] == [100]
    assert first.tokens == alone([1, 2, 3], 2)
    assert second.tokens == alone([1, 2, 4], 2)


@pytest.mark.parametrize("run_at", ["launch", "collection"])
def test_a_cancel_in_flight_ends_the_stream_and_no_other_request_is_affected(run_at: Any) -> None:
    runtime = SmallRuntime(run_at=run_at, overlap_depth=2)
    leaving, staying = runtime.submit([1, 2, 3], 40), runtime.submit([4, 5, 6, 7, 8], 40)
    leaves_at = 5

    def take(offset: int, tokens: list[int], logprobs: Any) -> None:
        Answer.take(leaving, offset, tokens, logprobs)
        if len(leaving.tokens) == leaves_at:
            runtime.host.cancel(leaving.request_id)

    leaving.on_tokens = take
    runtime.run()
    assert leaving.reason == "cancelled"
    assert leaving.tokens == alone([1, 2, 3], 40)[: len(leaving.tokens)]
    assert leaves_at <= len(leaving.tokens) <= leaves_at + 1
    assert staying.tokens == alone([4, 5, 6, 7, 8], 40)


def test_a_deadline_ends_a_request_that_runs() -> None:
    now_ns = 0

    def tick() -> int:
        nonlocal now_ns
        now_ns += 50_000
        return now_ns

    runtime = SmallRuntime(clock=HostClock(tick), overlap_depth=2, running_timeout_us=4_000)
    late = runtime.submit([1, 2, 3], 80)
    runtime.run()
    assert late.reason == "timeout"
    assert 0 < len(late.tokens) < 80
    assert late.tokens == alone([1, 2, 3], 80)[: len(late.tokens)]


def test_a_deadline_passes_while_nothing_runs() -> None:
    """The host wakes by itself: no further message arrives."""
    runtime = SmallRuntime(max_running_requests=1, waiting_timeout_us=20_000)
    runtime.host.ask(Pause())
    answer = runtime.submit([1, 2, 3], 4)
    thread = threading.Thread(target=runtime.run, daemon=True)
    thread.start()
    assert answer.over.wait(120)
    assert answer.reason == "deadline"
    thread.join(120)
    assert not thread.is_alive()


@pytest.mark.parametrize("run_at", ["launch", "collection"])
def test_a_model_that_raises_ends_its_batch_only(run_at: Any) -> None:
    runtime = SmallRuntime(run_at=run_at, overlap_depth=2, radix_cache=False, max_running_requests=1)
    runtime.model.fail_at = lambda batch: (
        RuntimeError("no such kernel\nsecond line") if batch.lengths_host.tolist() == [13] else None
    )
    answers = {n: runtime.submit([9] * n, 6) for n in (6, 13, 14)}
    runtime.run()
    assert [answer.reason for answer in answers.values()] == ["length", "error", "length"]
    assert answers[14].tokens == alone([9] * 14, 6)
    assert not answers[13].tokens
    failed = [event.error for event, _ in runtime.steps if isinstance(event, BatchFinished) and event.error]
    assert failed == ["RuntimeError: no such kernel"]


def test_what_is_no_number_ends_its_request() -> None:
    runtime = SmallRuntime(overlap_depth=1)
    broken = alone([3, 1, 4], 8)[4]
    runtime.model.not_a_number = {broken}
    answer, other = runtime.submit([3, 1, 4], 8), runtime.submit([2, 7, 1, 8], 3)
    runtime.run()
    assert answer.reason == "invalid"
    assert answer.tokens == alone([3, 1, 4], 8, stops=(broken,))
    assert broken in alone([2, 7, 1, 8], 3) or other.tokens == alone([2, 7, 1, 8], 3)


def test_a_lost_device_ends_the_engine_and_ends_all_requests() -> None:
    runtime = SmallRuntime(overlap_depth=2)
    runtime.model.fail_at = lambda batch: DeviceLost("the device is gone") if batch.longest > 6 else None
    answers = [runtime.submit([1, 2, 3], 20), runtime.submit([4, 5], 20)]
    with pytest.raises(DeviceLost, match="gone"):
        runtime.run()
    assert [answer.reason for answer in answers] == ["the engine failed: DeviceLost: the device is gone"] * 2
    with pytest.raises(EngineStopped, match="gone"):
        runtime.submit([1], 1)
    with pytest.raises(EngineStopped, match="gone"):
        runtime.host.ask(GetState())


def test_a_journal_that_cannot_be_written_ends_the_engine_before_anything_is_sent(tmp_path: Path) -> None:
    writer = JournalWriter.create(tmp_path, JournalHeader(config=small_config(**STIRRED)))
    runtime = SmallRuntime(journal=writer)
    answer = runtime.submit([1, 2, 3], 20)
    writer._os_write = lambda file, data: (_ for _ in ()).throw(OSError(28, "no space left"))  # type: ignore[method-assign,assignment]
    with pytest.raises(JournalError, match="no space left"):
        runtime.run()
    assert not answer.tokens
    assert "no space left" in answer.reason


def test_ctrl_c_ends_all_requests_and_is_passed_on() -> None:
    runtime = SmallRuntime()

    def interrupt(batch: Any) -> None:
        raise KeyboardInterrupt

    runtime.model.fail_at = interrupt
    answer = runtime.submit([1, 2, 3], 20)
    with pytest.raises(KeyboardInterrupt):
        runtime.run()
    assert answer.reason.startswith("the engine failed: KeyboardInterrupt")


def test_a_thread_of_its_own_serves_others_until_it_is_drained_and_stopped() -> None:
    runtime = SmallRuntime(check=False, overlap_depth=1)
    thread = threading.Thread(target=runtime.host.run)
    thread.start()
    requests = random_requests(3, 8)
    answers = [runtime.submit(prompt, count) for prompt, count in requests]
    assert runtime.host.drain().result(timeout=120).ok
    refused = runtime.submit([1, 2], 3)
    assert refused.over.wait(120)
    assert refused.reason == "draining"
    runtime.host.stop()
    thread.join(120)
    assert not thread.is_alive()
    assert [answer.tokens for answer in answers] == [alone(prompt, count) for prompt, count in requests]
    with pytest.raises(EngineStopped, match="was stopped"):
        runtime.submit([1], 1)


def test_a_stop_leaves_no_request_waiting() -> None:
    runtime = SmallRuntime()
    answer, asked = runtime.submit([1, 2, 3], 50), runtime.host.ask(GetState())
    runtime.host.stop()
    runtime.host.run()
    assert answer.reason == "the engine was stopped"
    with pytest.raises(EngineStopped):
        asked.result(timeout=0)


def test_orders_that_this_host_has_no_hands_for_are_answered() -> None:
    runtime = SmallRuntime(max_loras=1)
    refused = [
        runtime.host.ask(UpdateWeights(2, "elsewhere")),
        runtime.host.ask(ReleaseMemory(("kv_cache",))),
    ]
    runtime.host.ask(LoadAdapterControl("tone", 1))
    spoken = runtime.submit([1, 2], 3, adapter="tone")
    grammar = Grammar("regex", "a*", b"digest of sixteen")
    bound = runtime.submit([1, 2], 3, grammar=grammar)
    stops = runtime.submit([1, 2], 3, stop_texts=("end",))
    runtime.run()
    answers = [answer.result(timeout=0) for answer in refused]
    assert [answer.ok for answer in answers] == [False, False]
    assert "cannot change its weights" in answers[0].message
    assert spoken.reason == "error"
    assert isinstance(bound.end, RejectRequest)
    assert "has no grammar compiler" in bound.end.message
    assert isinstance(stops.end, RejectRequest)
    assert "need a tokenizer" in stops.end.message


def test_samples_of_one_prompt_have_a_stream_each() -> None:
    runtime = SmallRuntime()
    answers = [Answer(), Answer(), Answer()]
    runtime.host.submit(request([1, 2, 3], 4, parallel_samples=3), *map(Ends, answers))
    runtime.run()
    assert [answer.tokens for answer in answers] == [alone([1, 2, 3], 4)] * 3
    with pytest.raises(ValueError, match="3 samples needs as many sinks, got 1"):
        runtime.host.submit(request([1, 2, 3], 4, parallel_samples=3), Ends(Answer()))


def test_results_beside_tokens_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over chunks, retractions and batches in flight: each position once, and equal to the result alone."""
    prompt = list(range(20))
    served = []
    for settings in ({}, {"retract_every": 2, "overlap_depth": 2, "chunked_prefill_size": 8}):
        runtime = SmallRuntime(radix_cache=False, **settings)
        others = [runtime.submit([50 + n, 1, 2], 12) for n in range(3)]
        more = {"logprob_start": 3, "sampling": SamplingParams(top_logprobs=2), "return_hidden_states": True}
        answer = runtime.submit(prompt, 9, **more)
        runtime.run()
        assert all(other.reason == "length" for other in others)
        assert answer.extras is not None
        assert answer.tokens == alone(prompt, 9)
        assert len(answer.logprobs) == 9
        assert sorted(answer.extras.prompt_logprobs) == list(range(4, 20))
        assert sorted(answer.extras.hidden_states) == list(range(28))
        states = np.stack([answer.extras.hidden_states[p] for p in range(28)])
        assert states[:, 1].tolist() == [*prompt, *answer.tokens[:8]]
        served.append((answer.tokens, answer.logprobs, answer.extras.prompt_logprobs, states.tolist()))
    assert served[0] == served[1]


def test_prompts_alone_are_pooled_or_judged() -> None:
    runtime = SmallRuntime(chunked_prefill_size=8)
    prompt = list(range(30))
    pooled = runtime.submit(prompt, 0, kind="embed")
    scored = runtime.submit(prompt, 0, kind="score")
    plain = runtime.submit(prompt, 0)
    runtime.run()
    assert [one.reason for one in (pooled, scored, plain)] == ["computed"] * 3
    assert pooled.extras is not None
    assert scored.extras is not None
    assert plain.extras is not None
    assert pooled.extras.pooled is not None
    assert scored.extras.pooled is not None
    assert plain.extras.pooled is None
    assert pooled.extras.pooled.values[1] == np.mean(prompt)
    assert int(scored.extras.pooled.values.argmax()) == next_token(prompt)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_fails_in_a_batch_no_other_reads_wrong_kv(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches fail before their changes are folded, during it, or after it. The canary checks every read."""
    rng = random.Random(seed)
    runtime = SmallRuntime(
        run_at=rng.choice(["launch", "collection"]),
        overlap_depth=seed % 3,
        decode_steps_per_launch=rng.choice([1, 3]),
        max_running_requests=rng.choice([2, 4]),
        pages=64,
    )

    def plant(part: Any, name: str) -> None:
        inner = getattr(part, name)

        def sometimes(*given: Any) -> Any:
            if rng.random() < 0.03:
                raise RuntimeError(f"planted in {name}")
            return inner(*given)

        monkeypatch.setattr(part, name, sometimes)

    for part, name in (
        (runtime.executor.lane, "begin"),
        (runtime.executor.lane, "upload"),
        (runtime.executor.tables, "fold"),
        (runtime.model, "forward"),
    ):
        plant(part, name)
    beginnings = [[rng.randrange(97) for _ in range(12)] for _ in range(3)]
    asked = []
    for _ in range(4):
        for _ in range(8):
            begun = rng.choice(beginnings)[: rng.randrange(13)]
            prompt, count = [*begun, *(rng.randrange(97) for _ in range(rng.randrange(1, 20)))], rng.randrange(1, 20)
            asked.append((prompt, count, runtime.submit(prompt, count)))
        runtime.run()
    ended = [(prompt, count, answer) for prompt, count, answer in asked if answer.reason == "length"]
    assert 0 < len(ended) < len(asked)
    for prompt, count, answer in ended:
        assert answer.tokens == alone(prompt, count)


def test_scores_of_a_batch_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SmallRuntime(chunked_prefill_size=64)
    inner, shapes = runtime.model.logits, []
    monkeypatch.setattr(runtime.model, "logits", lambda hidden: shapes.append(len(hidden)) or inner(hidden))
    prompts = [[n, 1, 2, 3 + n] for n in range(5)]
    kinds: list[Any] = ["score", "embed", "score", "generate", "score"]
    asked = [runtime.submit(one, 0, kind=kind) for one, kind in zip(prompts, kinds, strict=True)]
    runtime.run()
    assert 3 in shapes
    assert 1 not in shapes
    for prompt, kind, answer in zip(prompts, kinds, asked, strict=True):
        assert answer.extras is not None
        if kind == "score":
            assert answer.extras.pooled is not None
            assert int(answer.extras.pooled.values.argmax()) == next_token(prompt)


class Alternating:
    """A grammar of even tokens behind odd ones and odd behind even, which ends with a multiple of ten."""

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}
        self.owners: dict[int, tuple[int, int]] = {}

    def take_row(self, taken: RowTaken) -> None:
        self.seen.pop(taken.row, None)
        self.owners[taken.row] = (taken.request_id, taken.epoch)
        if taken.grammar is not None:
            self.seen[taken.row] = []

    def advance(self, request_id: int, epoch: int, tokens: Sequence[int]) -> None:
        for row, owner in self.owners.items():
            if owner == (request_id, epoch):
                self.seen[row] += tokens

    def allowed(self, rows: Int32s) -> Int32s:
        masks = np.ones((len(rows), VOCABULARY), np.bool_)
        for i, row in enumerate(rows.tolist()):
            if row in self.seen:
                masks[i] = np.arange(VOCABULARY) % 2 == len(self.seen[row]) % 2
        padded = np.pad(masks, ((0, 0), (0, -VOCABULARY % 32)))
        return np.packbits(padded, axis=1, bitorder="little").view(np.int32)

    def ended(self, row: int, token: int) -> bool:
        return token % 10 == 0

    def forced(self, row: int, token: int) -> list[int]:
        return []


@pytest.mark.parametrize("run_at", ["launch", "collection"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_batch_under_a_grammar_samples_behind_its_mask(depth: int, run_at: Any) -> None:
    served = []
    drafts: dict[str, Any] = {"speculative_method": "ngram", "drafter": Foreseeing}
    for settings in ({}, {"retract_every": 3}, drafts, {**drafts, "retract_every": 3}):
        runtime = SmallRuntime(
            run_at=run_at,
            overlap_depth=depth,
            matchers=Alternating(),
            requests=RequestServices(compile_grammar=lambda command, answer: answer("")),
            **settings,
        )
        grammar = Grammar("regex", "alternating", b"digest of sixteen")
        bound = [runtime.submit([n, 2, 3], 12, grammar=grammar) for n in range(4)]
        free = runtime.submit([9, 9], 12)
        runtime.run()
        assert free.tokens == alone([9, 9], 12)
        for answer in bound:
            assert [token % 2 for token in answer.tokens] == [n % 2 for n in range(len(answer.tokens))]
            assert answer.reason == ("grammar" if answer.tokens[-1] % 10 == 0 else "length")
        served.append([answer.tokens for answer in bound])
        assert bool(runtime.host.drafts.right) == ("drafter" in settings)
    assert served == [served[0]] * 4


def test_a_cancelled_future_ends_no_host() -> None:
    """A future that was cancelled cannot take an answer; the control is not performed."""
    runtime = SmallRuntime()
    gone, there = runtime.host.ask(Pause()), runtime.host.ask(GetState())
    assert gone.cancel()
    answer = runtime.submit([1, 2, 3], 4)
    runtime.run()
    assert there.result(timeout=0).ok
    assert answer.tokens == alone([1, 2, 3], 4)
    stopped = SmallRuntime()
    gone, there = stopped.host.ask(GetState()), stopped.host.ask(GetState())
    assert gone.cancel()
    stopped.host.stop()
    stopped.host.run()
    assert isinstance(there.exception(timeout=0), EngineStopped)


class NotedEnds:
    """A sink that keeps its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def tokens(self, offset: int, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        self.calls.append((offset, tokens, None if logprobs is None else logprobs.logprobs.tolist()))

    def finished(self, end: FinishRequest, extras: ResultExtras) -> None:
        self.calls.append((end, extras.weights))

    def rejected(self, end: RejectRequest) -> None:
        self.calls.append((end,))

    def failed(self, message: str) -> None:
        self.calls.append((message,))


def test_a_resumed_request_gets_what_its_sink_lacks_and_goes_on() -> None:
    """Of five samples before the restart one runs, one has ended, one was refused, and one sink has its end already."""
    runtime = SmallRuntime()
    prompt, sinks = [3, 1, 4, 1, 5], [NotedEnds() for _ in range(5)]
    running = msgspec.structs.replace(request(prompt, 6), request_id=0)
    runtime.engine.step(running)
    runtime.host.adopt(running, sinks[:1], [UnsentOutput(0, [], {})])
    ended = msgspec.structs.replace(running, request_id=5, parallel_samples=3)
    finish, refuse = FinishRequest(5, "length", 5, 4, 0), RejectRequest(6, "bad_request", "no")
    logprobs: dict[int, Any] = {2: (-0.5, None, None), 3: (-1.0, None, None)}
    unsent = [UnsentOutput(2, [7, 8], logprobs, finish, ((0, 3),)), UnsentOutput(0, [], {}, refuse), None]
    runtime.host.adopt(ended, sinks[1:4], unsent)
    assert [sink.calls for sink in sinks[1:]] == [[(2, [7, 8], [-0.5, -1.0]), (finish, ((0, 3),))], [(refuse,)], [], []]
    with pytest.raises(ContractError, match="request 9 cannot be resumed: the engine does not have it"):
        runtime.host.adopt(msgspec.structs.replace(running, request_id=9), sinks[4:], [UnsentOutput(1, [7], {})])
    assert sinks[4].calls == [(1, [7], None)]
    runtime.host.run(until_idle=True)
    *sent, end = sinks[0].calls
    assert [token for _, tokens, _ in sent for token in tokens] == alone(prompt, 6)
    assert end[0].reason == "length"
    assert [len(sink.calls) for sink in sinks[1:]] == [2, 1, 0, 1]


def test_messages_are_received_after_so_many_decodes() -> None:
    """A request that is submitted while another decodes is folded some batches later."""

    def batches_between(interval: int) -> int:
        runtime = SmallRuntime(requests=RequestServices(receive_interval=interval))
        submitted: list[int] = []

        def tokens(offset: int, found: list[int], logprobs: TokenLogprobs | None) -> None:
            if offset >= 2 and not submitted:
                submitted.append(len(runtime.plans))
                runtime.submit([7, 8], 1)

        runtime.submit([1, 2, 3], 30).on_tokens = tokens
        runtime.run()
        arrived = [at for at, (event, _) in enumerate(runtime.steps) if isinstance(event, RequestArrived)]
        launched = sum(step.launched() is not None for _, step in runtime.steps[: arrived[1]])
        return launched - submitted[0]

    assert batches_between(1) <= 1
    assert batches_between(6) > 1


def test_the_first_token_of_another_engine_is_watched_like_others() -> None:
    """Token 7 completes a stop text, and token 8 may begin one."""
    watch = SimpleNamespace(push=lambda number, token: (token == 7, 2 if token == 8 else 0))
    runtime = SmallRuntime(requests=RequestServices(watch_text=lambda event: watch))
    first, second = runtime.submit([1, 2], 3, stop_texts=("x",)), runtime.submit([1, 2], 3)
    runtime.host._take_in()
    host, results = runtime.host, PromptResults(logprob=-0.5, prompt_logprobs={1: -2.0})
    assert host.take_first_token(99, 7, results) == (False, False)
    assert host.take_first_token(second.request_id, 7, results) == (False, False)
    found = [host.take_first_token(first.request_id, token, results) for token in (6, 7, 8)]
    assert found == [(False, False), (True, False), (False, True)]
    for answer in (first, second):
        extras = host.extras_of(answer.request_id)
        assert extras is not None
        assert extras.prompt_logprobs == {1: -2.0}
        assert host._open[answer.request_id].logprobs == {0: (-0.5, None, None)}
    assert host.extras_of(99) is None


def test_a_host_is_not_idle_while_the_device_is_changed() -> None:
    """The weights are loaded over several turns of the loop, which ends behind them."""
    loads: list[tuple[int, str]] = []

    class SlowLoader:
        def load_weights(self, version: int, source: str) -> None:
            until(lambda: runtime.host.turns > 3, 120)
            loads.append((version, source))

    runtime = SmallRuntime(device=DeviceServices(weight_loader=cast(Any, SlowLoader())))
    answered = runtime.host.ask(UpdateWeights(1, "/models/a"))
    runtime.host.run(until_idle=True)
    assert loads == [(1, "/models/a")]
    assert answered.result(0).ok
    assert (runtime.host.weights.version, runtime.host.weights.source) == (1, "/models/a")


class NotingEncoder:
    """Encodes nothing, and notes the groups of contents that it is given, among what a loader of weights does."""

    def __init__(self) -> None:
        self.noted: list[Any] = []

    def hold(self, request_id: int, contents: Any) -> None:
        """Keep nothing."""

    def release(self, request_id: int, spans: Any) -> None:
        """Forget nothing."""

    def encode(self, digests: Sequence[bytes], drop: Sequence[bytes]) -> list[str]:
        self.noted.append((list(digests), list(drop)))
        return [f"planted {digest[0]}" for digest in digests]

    def load_weights(self, version: int, source: str) -> None:
        self.noted.append(version)


def pictured(*numbers: int) -> dict[str, Any]:
    """A request with pictures of two tokens each."""
    return {"spans": tuple(PromptSpan(2 * i, 2 * i + 2, "image", bytes([n] * 32), 2) for i, n in enumerate(numbers))}


def test_contents_of_requests_that_come_together_are_one_group() -> None:
    """Also those of several steps of the engine, so that ranks can divide them; each order has an answer of its own."""
    noting = NotingEncoder()
    runtime = SmallRuntime(device=DeviceServices(encoder=noting))
    answers = [runtime.submit([1] * 6, 2, **pictured(*numbers)) for numbers in ((1, 2), (3,), (2, 4))]
    text = runtime.submit([1, 2, 3], 2)
    runtime.run()
    assert noting.noted == [([bytes([n] * 32) for n in (1, 2, 3, 4)], [])]
    assert [one.reason for one in answers] == ["media"] * 3
    assert text.tokens == alone([1, 2, 3], 2)
    answered = [event.error for event, _ in runtime.steps if isinstance(event, MediaEncoded)]
    assert answered == [f"planted {n}" for n in (1, 2, 3, 4)]


def test_contents_are_encoded_before_a_later_change_of_weights() -> None:
    noting = NotingEncoder()
    runtime = SmallRuntime(device=DeviceServices(encoder=noting, weight_loader=cast(Any, noting)))
    runtime.submit([1] * 6, 2, **pictured(1))
    answered = runtime.host.ask(UpdateWeights(1, "/models/a"))
    runtime.run()
    assert answered.result(0).ok
    assert noting.noted[:2] == [([bytes([1] * 32)], []), 1]


def test_an_order_that_no_engine_gives_yet_ends_the_host_with_its_name() -> None:
    runtime = SmallRuntime()
    answer = runtime.submit([1, 2, 3], 4)
    step = runtime.engine.step

    def ordering(event: Any) -> Any:
        made = step(event)
        made.commands.append(CancelTransfer(7))
        return made

    runtime.engine.step = ordering  # type: ignore[method-assign]
    with pytest.raises(ContractError, match="ordered CancelTransfer, which this host does not support"):
        runtime.run()
    assert "CancelTransfer" in answer.failure


@pytest.mark.parametrize("depth", [0, 2])
def test_a_sink_that_raises_loses_its_own_request_and_no_others(depth: int, caplog: Any) -> None:
    runtime = SmallRuntime(overlap_depth=depth, max_running_requests=3)
    broken, other, deaf, refused = runtime.submit([1, 2, 3], 20), runtime.submit([1, 2, 4], 20), Answer(), Answer()

    def fail(*_: Any) -> None:
        raise OSError("the client's socket is gone")

    broken.on_tokens = fail
    deaf_ends = Ends(deaf)
    deaf_ends.finished = fail  # type: ignore[method-assign]
    runtime.host.submit(request([1, 2, 7], 3), deaf_ends)
    refused_ends = Ends(refused)
    refused_ends.rejected = fail  # type: ignore[method-assign]
    runtime.host.submit(request([], 3), refused_ends)
    runtime.run()
    assert other.tokens == alone([1, 2, 4], 20)
    assert broken.reason == "open"
    ended = {event.request_id: event.reason for event in runtime.decided(RequestFinished)}
    assert ended[broken.request_id] == "cancelled"
    assert "the sink of r0 failed: the request is cancelled" in caplog.text
    assert "failed at its end" in caplog.text
    assert "failed when it was rejected" in caplog.text


def test_all_requests_are_informed_of_the_end_although_one_cannot_be() -> None:
    runtime = SmallRuntime()
    first, second = Ends(Answer()), Answer()

    def fail(*_: Any) -> None:
        raise OSError("gone")

    first.failed = fail  # type: ignore[method-assign]
    runtime.host.submit(request([1], 4), first)
    runtime.host.submit(request([2], 4), Ends(second))
    asked = runtime.host.ask(GetState())
    runtime.host.stop()
    runtime.host.run()
    assert second.failure == "the engine was stopped"
    assert isinstance(asked.exception(timeout=0), EngineStopped)


def test_the_device_is_not_idle_while_more_and_more_is_sent() -> None:
    """Every arrival causes the next one: the host must launch before the last of them."""
    runtime = SmallRuntime(max_running_requests=8)
    step, sent, launched_at = runtime.engine.step, [0], list[int]()

    def stepping(event: Any) -> Any:
        if isinstance(event, RequestArrived) and sent[0] < 200:
            sent[0] += 1
            runtime.submit([sent[0] % 90, 2, 3], 1)
        made = step(event)
        if made.launched() is not None:
            launched_at.append(sent[0])
        return made

    runtime.engine.step = stepping  # type: ignore[method-assign]
    runtime.submit([1, 2, 3], 1)
    runtime.run()
    assert launched_at[0] < 5
    assert sent == [200]


def test_the_event_that_broke_the_engine_is_in_the_journal(tmp_path: Path) -> None:
    """With any exception: an error of our own is what the journal must show."""
    with JournalWriter.create(tmp_path, JournalHeader(config=small_config())) as journal:
        runtime = SmallRuntime(journal=journal)
        step = runtime.engine.step

        def breaking(event: Any) -> Any:
            if isinstance(event, BatchFinished):
                raise KeyError("a mistake")
            return step(event)

        runtime.engine.step = breaking  # type: ignore[method-assign]
        runtime.submit([1, 2, 3], 4)
        with pytest.raises(KeyError):
            runtime.run()
        read = read_journal(tmp_path)  # before it is closed: the event is on disk
    unsealed = [record for record in read.records() if isinstance(record, UnsealedRecord)]
    assert [type(record.event) for record in unsealed] == [BatchFinished]


@pytest.mark.parametrize("steps", [1, 4])
def test_no_hidden_states_come_of_positions_behind_the_end(steps: int) -> None:
    """A launch of several decodes continues behind an end token; nothing behind the end may be reported."""
    prompt = [1, 2, 3]
    said = alone(prompt, 10)
    end = said[5]
    expected = said[: said.index(end) + 1]
    runtime = SmallRuntime(decode_steps_per_launch=steps, eos_token_ids=(end,))
    answer = runtime.submit(prompt, 10, return_hidden_states=True)
    runtime.run()
    assert answer.tokens == expected
    assert answer.extras is not None
    assert sorted(answer.extras.hidden_states) == list(range(len(prompt) + len(expected) - 1))


def test_an_engine_that_is_ended_from_outside_ends_all_requests_once(caplog: pytest.LogCaptureFixture) -> None:
    """A watchdog ends it while requests arrive and end in the engine's own thread."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(4):
            runtime = SmallRuntime(check=False, canary=False, overlap_depth=1)
            thread = threading.Thread(target=runtime.host.run)
            answers, asked = [runtime.submit([number, 1, 2], 1 + n % 3) for n in range(60)], []
            thread.start()
            while not any(answer.over.is_set() for answer in answers[: number + 1]):
                asked.append(runtime.host.ask(GetState()))
            runtime.host.fail("a watcher said so")
            thread.join(120)
            assert not thread.is_alive()
            assert all(answer.over.wait(120) for answer in answers)
            assert {answer.reason for answer in answers} <= {"length", "the engine failed: a watcher said so"}
            assert all(one.exception(120) is None or "a watcher" in str(one.exception()) for one in asked)
    finally:
        sys.setswitchinterval(before)
    assert not caplog.records


def test_tokens_that_are_being_sent_come_before_the_end_from_outside() -> None:
    runtime, calls = SmallRuntime(check=False, canary=False), list[str]()
    ending = threading.Thread(target=lambda: runtime.host.fail("a watcher said so"))

    class Slow:
        """Receives tokens while another thread ends the engine."""

        def tokens(self, *given: object) -> None:
            ending.start()
            ending.join(0.2)
            calls.append("tokens")

        def failed(self, message: str) -> None:
            calls.append("failed")

        finished = rejected = tokens

    runtime.host.submit(request([1, 2], 5), Slow())
    runtime.host.run()
    ending.join()
    assert calls == ["tokens", "failed"]
