"""One journal, two hosts: plans of the simulator's scheduler run on the executor, with the right answers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("simpy", reason="the simulator is not installed")

from simpy import Environment  # noqa: E402

from lockstep.core.contract.config import SchedConfig  # noqa: E402
from lockstep.core.contract.errors import ConfigError, LockstepError  # noqa: E402
from lockstep.core.contract.events import BatchFinished, OpenSession, RequestRetracted  # noqa: E402
from lockstep.core.journal.records import JournalHeader  # noqa: E402
from lockstep.core.journal.replay import fold  # noqa: E402
from lockstep.core.journal.writer import JournalWriter  # noqa: E402
from lockstep.core.scheduler.engine import Engine  # noqa: E402
from lockstep.host.loop import HostClock  # noqa: E402
from lockstep.host.recorded import RecordedAnswer, run_recorded  # noqa: E402
from lockstep.runtime import assembly  # noqa: E402
from lockstep.runtime.models import build_model  # noqa: E402
from lockstep.runtime.overlap import CpuLane  # noqa: E402
from lockstep.runtime.recorded import Extent, make_runner  # noqa: E402
from lockstep.sim.cost import BatchShape, CpuModel, Duration  # noqa: E402
from lockstep.sim.host.arrivals import Arrivals  # noqa: E402
from lockstep.sim.host.device import EOS_TOKEN_ID  # noqa: E402
from lockstep.sim.host.engine_host import EngineHost  # noqa: E402
from lockstep.sim.host.host_options import HostOptions  # noqa: E402
from lockstep.sim.workload.generate import generate, parse_spec  # noqa: E402
from tests.support.model_passes import Passes  # noqa: E402
from tests.support.small_runtime import (  # noqa: E402
    VOCABULARY,
    Answer,
    Ends,
    SmallRuntime,
    alone,
    make_executor,
    request,
    small_config,
)

CHAT = "gen:n=18,rate=400,turns=uniform:1:3,think=fixed:1ms,shared_prefix=10x2,input=uniform:1:14,output=uniform:1:12"
TIGHT: dict[str, Any] = {
    "pages": 28,
    "reserve": "on_demand",
    "max_running_requests": 6,
    "eos_token_ids": (EOS_TOKEN_ID,),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "depth 0": {"overlap_depth": 0},
    "depth 1, mixed, shared in the same step": {"batching": "mixed", "same_step_sharing": True},
    "depth 2, retractions": {"overlap_depth": 2, "retract_every": 5, "retracted_kv": "cache"},
    "depth 2, several steps": {"overlap_depth": 2, "decode_steps_per_launch": 3},
}


class SomeTime:
    """A cost model: the time of a batch follows from its number of tokens."""

    def batch_us(self, shape: BatchShape) -> Duration:
        return Duration(500.0 + 10.0 * (shape.extend_tokens + shape.decode_rows), 0.0)

    def describe(self) -> dict[str, Any]:
        return {"kind": "some time"}


class Unmeasured:
    """A cost model without measurements."""

    def observe(self, *_: Any) -> None: ...

    def gauge(self, *_: Any) -> None: ...

    def cpu_interval(self, *_: Any) -> None: ...


def simulated(folder: Path, spec: str = CHAT, **settings: Any) -> SchedConfig:
    """The journal of a simulated run."""
    config = small_config(**{**TIGHT, **settings})
    with JournalWriter.create(folder, JournalHeader(config=config, host={"kind": "simulator"})) as journal:
        env = Environment()
        turns = generate(parse_spec(spec), seed=4)
        arrivals = Arrivals(turns)
        host = EngineHost(
            env, Engine(config), arrivals, SomeTime(), CpuModel(), journal, Unmeasured(), HostOptions(max_new_tokens=16)
        )
        env.process(host.run())
        env.run()
    return config


def reached(folder: Path) -> tuple[int, int, int]:
    """Counts of retractions, of requests that began behind cached tokens, and of answered tokens in later prompts."""
    retracted = hits = quoted = 0
    answered: set[int] = set()
    for event, step in fold(folder):
        retracted += sum(isinstance(one, RequestRetracted) for one in step.decided)
        if (plan := step.launched()) is not None:
            firsts = {taken.row for taken in plan.rows_taken}
            hits += sum(
                start > 0 for row, start in zip(plan.rows.tolist(), plan.starts.tolist(), strict=True) if row in firsts
            )
            quoted += len(answered & set(plan.token_ids.tolist()))
        if isinstance(event, BatchFinished):
            answered.update(np.frombuffer(event.tokens, np.int32).tolist())
    return retracted, hits, quoted


@pytest.mark.parametrize("run_at", ["launch", "collection"])
@pytest.mark.parametrize("name", SETTINGS)
def test_plans_of_a_simulator_answer_every_request_as_if_it_were_alone(name: str, run_at: Any, tmp_path: Path) -> None:
    config = simulated(tmp_path, **SETTINGS[name])
    retracted, hits, quoted = reached(tmp_path)
    assert retracted
    assert hits > 5
    assert quoted
    executor = make_executor(config, CpuLane(HostClock(), run_at=run_at))
    answers: list[RecordedAnswer] = []
    batches = list(run_recorded(tmp_path, executor, VOCABULARY, answers.append))
    assert [event.batch_id for event, _ in batches] == list(range(len(batches)))
    assert not any(result.error for _, result in batches)
    assert executor.canary is not None
    assert executor.canary.slots_verified > 1000
    assert not executor.in_flight
    assert len(answers) == 18
    for answer in answers:
        assert answer.tokens == alone(answer.prompt.tolist(), len(answer.tokens))
    assert sum(len(answer.tokens) for answer in answers) > 100


def test_the_executor_receives_the_same_requests_as_when_the_journal_was_written(tmp_path: Path) -> None:
    """Samples, turns of a session, truncated prompts, end tokens that are banned at first, output that was kept."""
    config = small_config(truncate_input="left", max_input_tokens=20, eos_token_ids=(5,), retract_every=4)
    with JournalWriter.create(tmp_path, JournalHeader(config=config, host={"kind": "runtime"})) as journal:
        runtime = SmallRuntime(journal=journal, **{name: getattr(config, name) for name in config.__struct_fields__})
        runtime.host.ask(OpenSession("talk", 90))
        answers = [Answer(), Answer()]
        sampled = request([1, 2, 3], 6, parallel_samples=2, min_new_tokens=3, stop_token_ids=(7,))
        runtime.host.submit(sampled, *map(Ends, answers))
        answers += [runtime.submit(range(3, 40), 6)]
        answers += [runtime.submit([4, number], 9, session="talk", ignore_eos=True) for number in range(2)]
        runtime.run()
    assert {answer.reason for answer in answers} <= {"length", "stop"}
    executor = make_executor(config, CpuLane(HostClock()))
    results = list(run_recorded(tmp_path, executor, VOCABULARY))
    assert all(result.tokens.tobytes() == event.tokens for event, result in results)
    told, before = executor.sampler.taken, runtime.executor.sampler.taken  # type: ignore[attr-defined]
    assert [taken for taken, _ in told] == [taken for taken, _ in before]
    assert [asdict(context) | {"tokens": context.tokens.tolist()} for _, context in told] == [
        asdict(context) | {"tokens": context.tokens.tolist()} for _, context in before
    ]
    contexts = [context for _, context in told]
    assert {context.stop_token_ids for context in contexts} == {(5, 7), (5,), ()}
    assert {context.prompt_tokens for context in contexts} >= {3, 2, 20, 13}
    assert any(len(context.tokens) > context.prompt_tokens for context in contexts)


def test_a_journal_that_breaks_off_leaves_nothing_on_the_device(tmp_path: Path) -> None:
    config = simulated(tmp_path, overlap_depth=2)
    whole = len(list(run_recorded(tmp_path, make_executor(config, CpuLane(HostClock())), VOCABULARY)))
    (log,) = (tmp_path / "journal").glob("*.log")
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    executor = make_executor(config, CpuLane(HostClock()))
    batches = list(run_recorded(tmp_path, executor, VOCABULARY))
    assert 3 < len(batches) < whole
    assert len(batches) < executor.forwards
    assert not executor.in_flight


def test_a_batch_that_fails_here_is_named(tmp_path: Path) -> None:
    config = simulated(tmp_path)
    executor = make_executor(config, CpuLane(HostClock()), canary=False)

    def fail(batch: Any) -> Exception | None:
        return RuntimeError("no such kernel") if executor.forwards == 4 else None

    executor.model.fail_at = fail  # type: ignore[attr-defined]
    with pytest.raises(LockstepError, match="batch 4 of the journal fails in this run: RuntimeError: no such kernel"):
        list(run_recorded(tmp_path, executor, VOCABULARY))


QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip


def test_plans_of_a_simulator_run_on_a_model(tmp_path: Path) -> None:
    """The runtime's own executor and sampler, with a canary; greedy answers are those of passes one by one."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    model = build_model(tmp_path, torch.float32, random_weights_seed=3)
    config = simulated(tmp_path / "run", CHAT.replace("n=18", "n=8"), overlap_depth=1, retract_every=6)
    assert all(reached(tmp_path / "run"))
    executor = assembly.make_executor(model, config, CpuLane(HostClock()), debug=True)
    answers: list[RecordedAnswer] = []
    assert not any(result.error for _, result in run_recorded(tmp_path / "run", executor, 300, answers.append))
    assert len(answers) == 8
    assert len({token for answer in answers for token in answer.tokens}) > 20
    for answer in answers:
        passes, tokens = Passes(model, pages_each=16), answer.prompt.tolist()
        said: list[int] = []
        for _ in answer.tokens:
            with torch.inference_mode():
                logits = passes.run({0: tokens})[0]
            tokens = [int(logits[-1].argmax())]
            said += tokens
        assert answer.tokens == said


def test_journal_of_one_of_several_ranks_is_refused() -> None:
    extent = Extent(pages=4, context_tokens=8)
    with pytest.raises(ConfigError, match="rank 1 of 4 data-parallel ones"):
        make_runner(extent, SchedConfig(dp_ranks=4, dp_rank=1))
