"""The emulated executor: its tokens are determined by the request, its timing by the cost model."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the server is not installed")

from click.testing import CliRunner

from lockstep.api.emulate import EmulatedAdapterCache, EmulatedExecutor, EmulatedTimes, Vocabulary, emulated_source
from lockstep.api.engines import build_engine, check_names
from lockstep.api.observability.drift import DriftMeter
from lockstep.api.serve import serve
from lockstep.api.settings import ServeSettings
from lockstep.core.contract.commands import FinishRequest, RejectRequest
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import (
    AdapterLoaded,
    BatchFinished,
    RequestArrived,
    RequestRetracted,
    SamplingParams,
    TokenIds,
)
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.scheduler.engine import Engine
from lockstep.host.adapters import AdapterRegistry
from lockstep.host.loop import HostClock, ResultExtras, RuntimeHost, TokenLogprobs
from lockstep.host.services import DeviceServices, RequestServices
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import BatchShape, Duration, roofline_model
from lockstep.sim.host.batch_shapes import RowAdapters
from lockstep.sim.host.links import Link
from lockstep.sim.run.assemble import assemble
from lockstep.sim.scenario.scenario import Scenario

WORDS = Vocabulary(first=300, count=700, end=256, mean_tokens=40)


class FixedCost:
    """A millisecond for each batch, and ten microseconds for each new token; 50 more for one on an adapter."""

    def batch_us(self, shape: BatchShape) -> Duration:
        assert (shape.adapters > 0) == (shape.adapter_tokens > 0)
        return Duration(1000.0 + 10.0 * (shape.extend_tokens + shape.decode_rows) + 50.0 * shape.adapter_tokens)

    def describe(self) -> dict[str, Any]:
        return {"kind": "fixed"}


class Heard:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.said: list[int] = []
        self.reason = ""

    def tokens(self, offset: int, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        assert offset == len(self.said)
        self.said += tokens

    def finished(self, end: FinishRequest, extras: ResultExtras) -> None:
        self.reason = end.reason

    def rejected(self, end: RejectRequest) -> None:
        self.reason = end.message

    def failed(self, message: str) -> None:
        self.reason = message


def served(
    requests: list[RequestArrived], observe: Any = None, speed: float = 1.0, lora: dict[str, str] | None = None,
    **settings: Any,
) -> list[Heard]:  # fmt: skip
    """The results of requests that run together on an engine of their own. An adapter load takes 5 ms."""
    config = SchedConfig(**{"pages": 256, "eos_token_ids": (256,), "context_tokens_max": 2048, **settings})
    clock = HostClock()
    executor = EmulatedExecutor(
        EmulatedTimes(FixedCost(), seed=1, speed=speed, adapters=bool(lora)), WORDS, config.rows_max, clock
    )
    cache = EmulatedAdapterCache(5_000_000, Link(1.0), clock, speed=speed) if lora else None
    host = RuntimeHost(
        Engine(config), executor, NoJournal(), clock, observe=observe, device=DeviceServices(adapters=cache)
    )
    if cache is not None:
        sources = {name: emulated_source(path) for name, path in (lora or {}).items()}
        AdapterRegistry(host, cache, emulated_source).begin(sources, restarted=False)
    heard = [Heard() for _ in requests]
    for request, sink in zip(requests, heard, strict=True):
        host.submit(request, sink)
    host.run(until_idle=True)
    return heard


def request(prompt: str, *, tokens: int = 50, temperature: float = 0.0, seed: int = 0, **more: Any) -> RequestArrived:
    ids = np.frombuffer(prompt.encode(), np.uint8).astype("<i4").tobytes()
    sampling = SamplingParams(temperature=temperature, seed=seed)
    return RequestArrived(0, request_id=-1, prompt=TokenIds(ids), max_new_tokens=tokens, sampling=sampling, **more)


def test_an_answer_follows_from_prompt_and_seed() -> None:
    alone = served([request("a", tokens=30, ignore_eos=True)])[0].said
    assert len(alone) == 30
    crowd = [request(text, tokens=30, ignore_eos=True) for text in ("b", "a", "cc")]
    assert served(crowd)[1].said == alone
    assert served([request("a", tokens=30, ignore_eos=True, seed=9)])[0].said == alone  # greedy
    hot = [served([request("a", temperature=1.0, seed=seed, ignore_eos=True)])[0].said for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    assert all(300 <= token < 1000 for token in alone)


def test_several_steps_in_a_launch_give_the_same_tokens() -> None:
    wanted = [request(text, tokens=40) for text in ("one", "two", "three")]
    single = served(wanted)
    assert [one.said for one in served(wanted, decode_steps_per_launch=4)] == [one.said for one in single]


@pytest.mark.parametrize("interval", [1, 6])
def test_requests_are_received_after_so_many_decodes(interval: int) -> None:
    """A request is submitted as the seventh decode begins: its arrival waits for the end of the interval."""
    seen: list[str] = []
    config = SchedConfig(pages=256, eos_token_ids=(256,), context_tokens_max=2048)
    clock = HostClock()
    executor = EmulatedExecutor(EmulatedTimes(FixedCost(), seed=1), WORDS, config.rows_max, clock)

    def observe(event: Any, step: Any) -> None:
        if isinstance(event, RequestArrived):
            seen.append("arrival")
        if (plan := step.launched()) is not None:
            seen.append(plan.mode)
            if seen.count("decode") == 7 and plan.mode == "decode":
                host.submit(request("b", tokens=4, ignore_eos=True), second)

    services = RequestServices(receive_interval=interval)
    host = RuntimeHost(Engine(config), executor, NoJournal(), clock, requests=services, observe=observe)
    first, second = Heard(), Heard()
    host.submit(request("a", tokens=40, ignore_eos=True), first)
    host.run(until_idle=True)
    assert (len(first.said), len(second.said)) == (40, 4)
    arrived = seen.index("arrival", 1)
    assert seen[:arrived].count("decode") == (7 if interval == 1 else 12)


def test_an_answer_is_the_same_behind_a_retraction() -> None:
    retracted = []

    def observe(event: Any, step: Any) -> None:
        retracted.extend(one for one in step.decided if isinstance(one, RequestRetracted))

    wanted = [request(f"number {i}", tokens=60, ignore_eos=True) for i in range(6)]
    plenty = [one.said for one in served(wanted)]
    assert [one.said for one in served(wanted, observe, pages=16, reserve="on_demand")] == plenty
    assert retracted


def test_answers_end_by_themselves_around_the_mean() -> None:
    lengths = [WORDS.length(WORDS.key(np.array([i], np.int32), None)) for i in range(2000)]
    assert 36 < np.mean(lengths) < 44
    assert min(lengths) == 1
    heard = served([request(f"{i}", tokens=2000) for i in range(20)], speed=100)
    assert all(one.reason == "stop" and one.said[-1] == 256 for one in heard)
    never = Vocabulary(first=300, count=700, end=256, mean_tokens=0)
    assert never.length(17) == 0
    assert Vocabulary(first=300, count=700, end=256, mean_tokens=1).length(17) == 1


def test_min_new_tokens_come_before_the_end() -> None:
    (heard,) = served([request("x", tokens=200, min_new_tokens=150)])
    assert len(heard.said) >= 150
    assert 256 not in heard.said[:149]


@pytest.mark.parametrize(("speed", "depth"), [(1.0, 0), (1.0, 1), (4.0, 1)])
def test_batches_take_the_time_of_the_cost_model(speed: float, depth: int) -> None:
    finished: list[BatchFinished] = []

    def observe(event: Any, step: Any) -> None:
        if isinstance(event, BatchFinished):
            finished.append(event)

    served([request("x" * 100, tokens=30, ignore_eos=True)], observe, speed=speed, overlap_depth=depth)
    took = [event.finished_us - event.started_us for event in finished]
    assert abs(took[0] - 2000 / speed) <= 1
    assert all(abs(one - 1010 / speed) <= 1 for one in took[1:])
    assert all(event.time_us >= event.finished_us for event in finished)
    assert all(a.finished_us <= b.started_us for a, b in pairwise(finished))


@pytest.mark.parametrize("engine", [None, "sglang", "none"])
def test_batches_take_the_time_of_an_engine_as_simulated_ones_do(engine: str | None) -> None:
    unit = build_engine(ServeSettings(emulate="qwen3-32b@h100", tp=2, engine=engine))
    times = unit.host.executor._times
    setup = assemble(Scenario(model="qwen3-32b", gpu="h100", tp=2, engine=engine, workload="gen:n=1"), {})
    shape = BatchShape(decode_rows=16, decode_context_tokens=16_000, sampled_rows=16)
    assert times._cost.batch_us(shape) == setup.cost.batch_us(shape)
    kernels = roofline_model(load_model("qwen3-32b"), load_gpu("h100"), 2).batch_us(shape).mean_us
    assert (
        times._cost.batch_us(shape).mean_us == kernels
        if engine == "none"
        else times._cost.batch_us(shape).mean_us > kernels
    )


def test_an_unknown_engine_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"^`engine` must be an engine of the catalogue"):
        check_names(ServeSettings(emulate="qwen3-8b@h100", engine="nope"))
    with pytest.raises(ConfigError, match="`emulate` is bge-m3@l4, but an emulated engine has neither vectors nor"):
        check_names(ServeSettings(emulate="bge-m3@l4"))
    with pytest.raises(ConfigError, match="`engine` is for an emulated engine"):
        ServeSettings(engine="vllm")


def test_adapters_take_the_time_of_the_cost_model() -> None:
    """Products of the rows on adapters, loads one after the other, and the measured drift."""
    adapter_of: dict[int, str] = {}  # by row
    on_adapters: dict[int, int] = {}  # tokens of each batch
    expected_us: dict[int, int] = {}
    loaded_us: list[int] = []
    meter = DriftMeter(FixedCost(), adapters=RowAdapters())

    def observe(event: Any, step: Any) -> None:
        meter.fold(event, step)
        if isinstance(event, AdapterLoaded):
            loaded_us.append(event.time_us)
        if isinstance(event, BatchFinished):
            assert abs(event.finished_us - event.started_us - expected_us[event.batch_id]) <= 1
        if (plan := step.launched()) is not None and len(plan.rows):
            adapter_of.update({taken.row: taken.adapter for taken in plan.rows_taken})
            new = (plan.stops - plan.starts).tolist()
            on = sum(n for row, n in zip(plan.rows.tolist(), new, strict=True) if adapter_of[row])
            on_adapters[plan.batch_id] = on
            expected_us[plan.batch_id] = 1000 + 10 * sum(new) + 50 * on

    wanted = [request("x" * 100, tokens=8, ignore_eos=True, adapter=name) for name in ("law", "med")]
    wanted.append(request("y" * 50, tokens=80, ignore_eos=True))
    served(wanted, observe, lora={"law": "of/law", "med": "of/med"}, max_loras=3, max_running_requests=8)
    assert sum(on_adapters.values()) == 2 * (100 + 7)
    assert 0 in on_adapters.values()
    first, second = loaded_us
    assert (first >= 5_000, second >= 10_000) == (True, True)
    for kind in meter.read():
        assert abs(kind.ratios / sum(kind.counts) - 1.0) < 0.001


def test_plans_without_support_are_refused() -> None:
    executor = EmulatedExecutor(EmulatedTimes(FixedCost(), seed=1), WORDS, 4, HostClock())
    with pytest.raises(ContractError, match="was not deferred"):
        executor.sample(1, ())
    assert not executor.ready()
    assert executor.in_flight == 0


def test_room_for_adapters_is_taken_off_the_cache() -> None:
    pages = []
    for more in ((), ("--lora", "law=x"), ("--lora", "law=x", "--max-lora-rank", "256")):
        shown = CliRunner().invoke(serve, ["--emulate", "qwen3-8b@h100", "--dry-run", *more])
        assert shown.exit_code == 0, shown.output
        (told,) = re.findall(r"^  pages = (\d+)$", shown.output, re.MULTILINE)
        pages.append(int(told))
    none, small, large = pages
    # of 8 slots, each 43.6 million numbers of two bytes at rank 16 (the checkpoint of such an adapter has 87 MB)
    page_bytes = 16 * 2 * 36 * 8 * 128 * 2
    assert abs((none - small) * page_bytes - 8 * 43_646_976 * 2) < 2 * page_bytes
    assert abs((none - large) * page_bytes - 16 * 8 * 43_646_976 * 2) < 2 * page_bytes
    refused = CliRunner().invoke(serve, ["--emulate", "deepseek-v3@h200", "--tp", "8", "--lora", "a=x", "--dry-run"])
    assert "has latent attention" in str(refused.exception)
    assert "hint: leave out --lora" in str(refused.exception)


@pytest.mark.parametrize("emulated", ["deepseek-v3@h100", "gpt-oss-120b@l40s"])
def test_a_model_that_does_not_fit_gets_hints_that_this_command_has(emulated: str) -> None:
    refused = CliRunner().invoke(serve, ["--emulate", emulated, "--dry-run"])
    message = str(refused.exception)
    assert "does not fit on 1 x" in message
    options = {option for parameter in serve.params for option in parameter.opts}
    assert set(re.findall(r"--[\w-]+", message.partition("hint: ")[2])) - options == set()
    assert "quantization_config" in message


def test_large_prompts_that_arrive_together_do_not_hold_up_batches() -> None:
    """The host takes in some 65,536 tokens of prompts, then launches, and takes in the next."""
    kinds: list[str] = []
    requests = [
        RequestArrived(0, request_id=-1, prompt=TokenIds(b"\1\0\0\0" * 40_000), max_new_tokens=1) for _ in range(8)
    ]
    heard = served(
        requests,
        lambda event, step: kinds.append(type(event).__name__),
        page_size=16,
        pages=8192,
        context_tokens_max=65_536,
    )
    assert [one.reason for one in heard] == ["length"] * 8
    arrivals = [at for at, kind in enumerate(kinds) if kind == "RequestArrived"]
    assert kinds.index("LaneReady") == 2
    assert len(arrivals) == 8
