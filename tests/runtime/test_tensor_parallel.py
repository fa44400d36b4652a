"""One engine over several ranks: the tokens of one rank, and an end with one sentence when a rank is lost.

Ranks are processes on the CPU that sum over gloo. Starting one takes seconds, so engines are shared: first the answers
of each are compared with those of a single rank, then each is lost in its own way.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from click.testing import CliRunner  # noqa: E402

from lockstep.core.contract.commands import BatchPlan, RowTaken  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import Grammar, RequestRetracted, SamplingParams  # noqa: E402
from lockstep.core.journal.replay import fold  # noqa: E402
from lockstep.host.batches import BatchResult, RowContext  # noqa: E402
from lockstep.host.errors import killed_from_outside  # noqa: E402
from lockstep.host.handover.kv import Fetch  # noqa: E402
from lockstep.host.services import RequestServices  # noqa: E402
from lockstep.runtime import LLM, Params, RequestOutput  # noqa: E402
from lockstep.runtime import ranks as ranks_module  # noqa: E402
from lockstep.runtime.errors import DeviceLost, EngineStopped, RankLost  # noqa: E402
from lockstep.runtime.executor import Executor  # noqa: E402
from lockstep.runtime.generate import generate  # noqa: E402
from lockstep.runtime.models import Parallel, build_model, read_settings  # noqa: E402
from lockstep.runtime.models.stage import ExpertSplit  # noqa: E402
from lockstep.runtime.overlap import CpuLane  # noqa: E402
from lockstep.runtime.rank_wire import (  # noqa: E402
    Channel,
    CloseTransfers,
    Collected,
    FetchPages,
    Launch,
    Mask,
    Order,
    PlanChain,
    ReadAdapter,
    Sample,
    StopWorker,
    ToLead,
    ToWorker,
    drawn_digest,
)
from lockstep.runtime.ranks import LeadExecutor, check_split, rank_device  # noqa: E402
from lockstep.runtime.worker import Follower, Orders, SentMasks  # noqa: E402
from tests.runtime.test_host import Alternating  # noqa: E402
from tests.support.live_server import until  # noqa: E402
from tests.support.small_llm import write_weights  # noqa: E402
from tests.support.small_runtime import VOCABULARY, SmallRuntime, alone, make_executor  # noqa: E402

# Errors planted in workers: at these prompts, and while a model is filled with random weights of this seed.
RAISE, MISDRAW, CANNOT_BEGIN, CHOOSES_OTHERWISE = [11] * 7, [13] * 7, 4711, 4712
PLANTED = f"""
import sys
if "lockstep.runtime.worker" in sys.orig_argv:
    from lockstep.runtime.executor import Executor
    run, finish = Executor._pass, Executor._finish
    def _pass(self, launched, number):
        if launched.plan.token_ids.tolist()[:7] == {RAISE}:
            print("a word of the worker", flush=True)
            raise ZeroDivisionError("planted")
        return run(self, launched, number)
    def _finish(self, launched):
        if launched.plan.token_ids.tolist()[:7] == {MISDRAW}:
            launched.logits = -launched.logits
        finish(self, launched)
    Executor._pass, Executor._finish = _pass, _finish
    import lockstep.runtime.models as models
    fill = models.fill_randomly
    def fill_randomly(wanted, seed, **ranks):
        if seed == {CANNOT_BEGIN}:
            raise OSError("planted")
        if seed == {CHOOSES_OTHERWISE}:
            import time
            from lockstep.runtime import assembly
            assembly._kernels = lambda *_: assembly.PassKernels("triton", graph_sizes=(1, 2))
            assembly.size_pool = lambda **_: time.sleep(3600)  # as in a sum over ranks of which one does not come
        fill(wanted, seed, **ranks)
    models.fill_randomly = fill_randomly
    import lockstep.runtime.memory as memory
    memory.CPU_KV_BYTES //= 2
"""

# Rank 0 is blocked, as by a kernel that never ends, when its worker is killed. It would end with status 0 otherwise.
HELD = """
import os, signal, sys, time
from lockstep.runtime import LLM, Params, llm, ranks
from lockstep.runtime.errors import EngineStopped
llm.GRACE_S = ranks.GRACE_S = 1.0
engine = LLM(tp=2, device="cpu")
(worker,) = engine.group._workers
def hold(*_, **__):
    os.kill(worker.process.pid, signal.SIGKILL)
    time.sleep(3600)
engine.host.executor.executor.launch = hold
sys.stdin.read()
try:
    with engine:
        engine.generate("def ")
except EngineStopped as error:
    print(error)
"""

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 301,  # an odd number of tokens: the last rank has a row of padding
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,  # on both ranks
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "dtype": "float32",
}

SMALL: dict[str, Any] = {"page_size": 4, "chunked_prefill_size": 16, "max_running_requests": 8, "pages": 200}
ENGINES: dict[str, dict[str, Any]] = {
    "depth 0": {"overlap_depth": 0, "debug": True},
    "depth 1, retractions, shared in the same step": {
        "overlap_depth": 1,
        "retract_every": 3,
        "same_step_sharing": True,
    },
    "depth 2, mixed, several steps, short of pages": {
        "overlap_depth": 2,
        "batching": "mixed",
        "decode_steps_per_launch": 2,
        "pages": 24,
        "reserve": "on_demand",
    },
    "experts, depth 1": {"overlap_depth": 1, "retract_every": 5},
    "whole experts, retractions": {"ep": 2, "retract_every": 5},
    "whole experts, sent to, retractions": {"ep": 2, "moe_a2a": True, "retract_every": 4},
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture of experts, with weights large enough that tokens differ."""
    return write_weights(tmp_path_factory.mktemp("experts"), MOE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands below."""
    made: Path = tmp_path_factory.mktemp("shells")
    for number in range(2):
        (made / f"tmp{number}").mkdir()
    return made


@pytest.fixture(scope="module")
def shells(folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """`lockstep generate --tp 2`, twice, and HELD, which wait for their input while the other tests run."""
    if not entry_points(group="lockstep.commands", name="generate"):  # the runtime is on the path, but not installed
        about = folder / "lockstep_planted-0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lockstep-planted\nVersion: 0\n")
        (about / "entry_points.txt").write_text("[lockstep.commands]\ngenerate = lockstep.runtime.generate:generate\n")
    run = (
        "from lockstep.runtime import ranks; ranks.CAUSE_S = ranks.LAST_WORD_S = 60.0;"
        "from lockstep.core.command import main; raise SystemExit(main())"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", run, "generate", "-", "--quiet", "--tp", "2", "--device", "cpu"],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
                "TMPDIR": str(folder / f"tmp{number}"),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in range(2)
    ]
    started.append(
        subprocess.Popen(
            [sys.executable, "-c", HELD],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    )
    yield started
    for process in started:
        process.kill()
        process.communicate()


def busy(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Submit more work than the engine can finish before its end, and wait for the first answer."""
    line = {"prompt": [5, 6, 7], "ignore_eos": True}
    lines = [line | {"max_new_tokens": 1}] + [line | {"max_new_tokens": 500}] * 300
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n".join(map(json.dumps, lines)).encode())
    process.stdin.close()
    process.stdin = None
    assert select.select([process.stdout], [], [], 300)[0], "no answer in 300 s"
    assert b"finish_reason" in process.stdout.readline()
    return process


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow for late reports about the loss of a rank."""
    monkeypatch.setattr(ranks_module, "CAUSE_S", 60.0)
    monkeypatch.setattr(ranks_module, "LAST_WORD_S", 60.0)


class Engines:
    """Engines of two ranks, made at first use."""

    def __init__(self, experts: Path, journals: Path) -> None:
        self.experts, self.journals = experts, journals
        self.made: dict[str, LLM] = {}

    def options(self, name: str) -> dict[str, Any]:
        options = {"model": None, **SMALL, **ENGINES[name]}
        if "experts" in name:
            options["model"] = self.experts
            del options["pages"]  # as many as fit
        return options

    def __call__(self, name: str) -> LLM:
        if name not in self.made:
            journal = self.journals / str(len(self.made))
            self.made[name] = LLM(tp=2, rank_timeout_s=300, journal=journal, **self.options(name))
        return self.made[name]


@pytest.fixture(scope="module")
def engines(experts: Path, shells: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    planted = tmp_path_factory.mktemp("planted")
    (planted / "sitecustomize.py").write_text(PLANTED)
    sys.path.insert(0, str(planted))  # workers find modules where this process does
    made = Engines(experts, tmp_path_factory.mktemp("journals"))
    yield made
    sys.path.remove(str(planted))
    for llm in made.made.values():
        llm.close()


def some_requests(count: int, vocabulary: int = 300) -> list[tuple[list[int], Params]]:
    """Prompts that begin alike, in groups; some are sampled, some penalised, some with logprobs."""
    rng = random.Random(5)
    beginnings = [[rng.randrange(3, vocabulary) for _ in range(rng.randrange(24))] for _ in range(4)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 20, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
        {"logprobs": 2, "prompt_logprobs": 1, "min_new_tokens": 6},
    ]
    return [
        (
            rng.choice(beginnings) + [rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, 20))],
            Params(max_new_tokens=rng.randrange(1, 13), **kinds[number % len(kinds)]),
        )
        for number in range(count)
    ]


def answered(llm: LLM) -> list[RequestOutput]:
    requests = some_requests(24)
    return llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])


def lost(llm: LLM, prompt: Sequence[int] = (5, 6, 7)) -> str:
    """The error that a request gets from an engine that is, or becomes, lost; it must come in finite time."""
    began = time.monotonic()
    with pytest.raises(EngineStopped) as said:  # noqa: PT012  what a rank said may be heard behind an answer
        while time.monotonic() - began < 120:
            llm.generate([list(prompt)] * 3, Params(max_new_tokens=200, ignore_eos=True))
    llm.close()
    assert time.monotonic() - began < 240
    assert llm.group is not None
    assert all(worker.process.returncode is not None for worker in llm.group._workers)
    return str(said.value)


def worker_of(llm: LLM) -> int:
    assert llm.group is not None
    return llm.group._workers[0].process.pid


# ------------------------------------------------------------------------------------------------------ the same tokens


@pytest.mark.parametrize("name", ENGINES)
def test_two_ranks_give_what_one_gives(engines: Engines, name: str) -> None:
    alone = {key: value for key, value in engines.options(name).items() if key not in ("ep", "moe_a2a")}
    with LLM(**alone) as single:
        expected, pages = answered(single), single.config.pages
    llm = engines(name)
    found = answered(llm)
    assert llm.model.parallel.ranks == 2
    assert llm.config.pages == (pages // 2 if "experts" in name else pages), "the worker has room for half"
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert len({tuple(answer.token_ids) for answer in found}) > 12, "of tokens that are all alike little is learnt"
    assert any(answer.cached_tokens for answer in found)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-4)
        assert list(ours.prompt_logprobs) == list(theirs.prompt_logprobs)
        np.testing.assert_allclose(
            list(ours.prompt_logprobs.values()), list(theirs.prompt_logprobs.values()), atol=2e-4
        )
    one = some_requests(1)[0][0]
    with LLM(**alone) as single:
        np.testing.assert_allclose(llm.embed([one])[0].vector, single.embed([one])[0].vector, atol=2e-4)
    assert llm._journal is not None
    llm._journal.flush()
    decided = [event for _, step in fold(llm._journal.folder.parent) for event in step.decided]
    retracted = any(isinstance(event, RequestRetracted) for event in decided)
    assert retracted == ("retract_every" in ENGINES[name] or "short" in name)


# ------------------------------------------------------------------------------------------------------- a rank is lost


def test_a_worker_that_does_not_answer_ends_the_engine(engines: Engines) -> None:
    llm = engines("depth 0")
    assert llm.group is not None
    llm.group.timeout_s = 2.0
    os.kill(worker_of(llm), signal.SIGSTOP)
    said = lost(llm)
    assert f"did not come back in 2 s from rank 1 (process {worker_of(llm)})" in said
    assert "stopped" in said or not Path("/proc/self/stat").exists()


def test_given_embeddings_reach_every_rank(engines: Engines) -> None:
    with LLM(**SMALL) as alone:
        ids = [random.Random(3).randrange(3, 300) for _ in range(50)]
        rows = alone.model.embeddings.weight.float()[ids]
        (expected,) = alone.generate([ids], Params(max_new_tokens=8))
    llm = engines("depth 1, retractions, shared in the same step")
    first, other = llm.generate([rows, rows + 0.5], Params(max_new_tokens=8))
    assert first.token_ids == expected.token_ids != other.token_ids
    assert llm.media is not None
    assert not llm.media.contents


def test_a_worker_that_is_killed_while_nothing_runs_ends_the_engine(engines: Engines) -> None:
    llm = engines("depth 1, retractions, shared in the same step")
    assert llm.group is not None
    (worker,) = llm.group._workers
    until(lambda: not worker.launched, 120)  # the last launched batch may still be there when all answers have arrived
    os.kill(worker_of(llm), signal.SIGKILL)
    until(lambda: bool(llm.host.failure), 120)
    said = lost(llm)
    assert f"rank 1 (process {worker_of(llm)}) was ended by SIGKILL" in said
    assert "with nothing to do" in said


def test_a_worker_that_raises_ends_the_engine_with_its_error(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    llm = engines("depth 2, mixed, several steps, short of pages")
    said = lost(llm, RAISE)
    assert f"rank 1 (process {worker_of(llm)}) failed with batch" in said
    assert "ZeroDivisionError: planted" in said
    assert not killed_from_outside(llm.host.error)
    assert "\n" not in said
    assert "rank 1: a word of the worker" in caplog.messages


def test_ranks_that_draw_other_tokens_end_the_engine(engines: Engines) -> None:
    llm = engines("experts, depth 1")
    said = lost(llm, MISDRAW)
    assert f"rank 1 (process {worker_of(llm)}) drew other tokens than rank 0 in batch" in said


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found by /proc")


@needs_proc
def test_a_killed_worker_ends_the_command_with_one_sentence(shells: list[subprocess.Popen[bytes]]) -> None:
    shell = busy(shells[0])
    (worker,) = children(shell.pid)
    os.kill(worker, signal.SIGKILL)
    _, said = shell.communicate(timeout=120)
    assert shell.returncode == 1
    assert said.decode().count("\n") == 1
    assert f"rank 1 (process {worker}) was ended by SIGKILL" in said.decode()
    assert re.search(r" with (batch \d+ in flight|batches \d+ to \d+ in flight|nothing to do)\n$", said.decode())


def test_waiting_requests_are_informed_although_rank_0_is_held(shells: list[subprocess.Popen[bytes]]) -> None:
    out, said = shells[2].communicate(b"", timeout=300)
    assert out.startswith(b"the engine failed: rank 1 (process ")
    assert b" was ended by SIGKILL" in out
    assert b"a thread of rank 0 does not return" in said
    assert shells[2].returncode == 1


@needs_proc
def test_workers_end_when_rank_0_is_killed(shells: list[subprocess.Popen[bytes]], folder: Path) -> None:
    shell = busy(shells[1])
    assert list(folder.glob("tmp1/*"))
    workers = children(shell.pid)
    assert len(workers) == 1
    os.kill(shell.pid, signal.SIGKILL)
    until(lambda: not any(_alive(pid) for pid in workers), 120)
    assert not list(folder.glob("tmp1/*")), "what the ranks met by is left behind"


def test_a_lost_device_ends_the_command_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost device with one rank: the same end."""

    def lose(*_: Any) -> None:
        raise DeviceLost("cuda:0 does not work any more: planted")

    monkeypatch.setattr(Executor, "_pass", lose)
    ran = CliRunner().invoke(generate, ["--prompt", "Returns", "--device", "cpu"], standalone_mode=False)
    assert ran.return_value == 1  # which `lockstep` ends with
    sentence = "lockstep generate: the engine failed: DeviceLost: cuda:0 does not work any more: planted\n"
    assert ran.stderr.endswith(sentence)
    assert ran.stderr.count("planted") == 1
    assert not [one for one in caplog.records if one.levelname in ("WARNING", "ERROR")]


def test_a_worker_that_cannot_begin_reports_why(engines: Engines, experts: Path) -> None:
    """Rank 0 has no error, so the message must come from the worker."""
    with pytest.raises(
        RankLost, match=r"rank 1 \(process \d+\) failed while loading the model: OSError: planted"
    ) as said:
        LLM(experts, tp=2, random_weights=CANNOT_BEGIN, **SMALL)
    assert "\n" not in str(said.value)


def test_ranks_that_chose_different_backends_end_before_any_pass(engines: Engines, experts: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match="came to cpu with 0 graphs on rank 0 and to triton with 2 graphs on"):
        LLM(experts, tp=2, device="cpu", random_weights=CHOOSES_OTHERWISE, **SMALL)
    assert time.monotonic() - began < 300  # one of its workers would take an hour


@pytest.mark.parametrize(
    ("ranks", "changed", "names"),
    [
        (3, {}, ["num_attention_heads` 4", "intermediate_size` 50", "it can be 1, 2"]),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6}, ["num_key_value_heads` 6", "intermediate_size` 50"]),
        (0, {}, ["must be at least 1, got `0`"]),
    ],
)
def test_ranks_that_do_not_divide_a_model_are_one_error(
    ranks: int, changed: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE | {"intermediate_size": 50} | changed))
    with pytest.raises(ConfigError) as said:
        LLM(tmp_path, tp=ranks)
    assert all(name in str(said.value) for name in names)


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_ranks_have_every_expert_once(ranks: int) -> None:
    names: list[str] = []
    whole = {one.name: one.into for one in build_model(MOE, random_weights_seed=3).tensors()}
    for rank in range(ranks):
        split = Parallel(rank, ranks, lambda one: one, lambda one: one, experts=ExpertSplit(ranks))
        config = {**MOE, "num_attention_heads": 6, "intermediate_size": 48}
        model = build_model(config, random_weights_seed=3, parallel=split)
        own = [one for one in model.tensors() if ".experts." in one.name]
        assert all(torch.equal(one.into, whole[one.name]) for one in own)
        names += [one.name for one in own]
        assert all(model.surplus(name) for name in whole if ".experts." in name and name not in {x.name for x in own})
        assert not model.surplus("model.layers.1.mlp.experts.6.up_proj.weight")
    assert sorted(names) == sorted(name for name in whole if ".experts." in name)


def test_experts_that_ranks_cannot_divide_are_one_error(experts: Path) -> None:
    with pytest.raises(ConfigError, match="`num_experts` 6 is not divided by 4"):
        check_split(read_settings(experts), 4, 4)
    with pytest.raises(ConfigError, match="`ep` is 2, but Qwen3ForCausalLM has no experts"):
        LLM(tp=2, ep=2)
    with pytest.raises(ConfigError, match=r"`ep` must be 1 .* or `tp` 2"):
        LLM(experts, tp=2, ep=4)
    with pytest.raises(ConfigError, match="`moe_a2a` sends tokens"):
        LLM(experts, tp=2, moe_a2a=True)


def test_each_rank_has_the_gpu_behind_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    first = torch.device("cuda", 1)
    assert [str(rank_device(first, rank, 3)) for rank in range(3)] == ["cuda:1", "cuda:2", "cuda:3"]
    assert str(rank_device(torch.device("cuda"), 0, 4)) == "cuda:0"
    with pytest.raises(ConfigError, match="`tp` 4 from cuda:1 on needs 5 GPUs, but torch sees 4"):
        rank_device(first, 0, 4)
    assert rank_device(torch.device("cpu"), 7, 8).type == "cpu"


def test_ranks_that_fit_a_model_are_accepted(experts: Path) -> None:
    for ranks in (1, 2, 4):
        check_split(read_settings(experts), ranks)


# ------------------------------------------------------------------------------------------------------------- the wire


def an_order(batch_id: int) -> Order:
    ints = np.arange(4, dtype=np.int32)
    plan = BatchPlan(
        batch_id=batch_id,
        mode="decode",
        rows=ints,
        request_ids=ints.astype(np.int64),
        starts=ints,
        stops=ints + 1,
        rows_taken=(RowTaken(1, 7, 0, SamplingParams(temperature=0.5, logit_bias=((3, 1.5),))),),
    )
    return Order(plan, False, (RowContext(ints, 2, stop_token_ids=(1, 2)),))


def as_lists(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=lambda array: array.tolist())


def test_a_plan_arrives_as_it_was_sent() -> None:
    lead, worker = PlanChain(), PlanChain()
    for number in range(3):
        order = an_order(number)
        found = worker.verify(lead.seal(order))
        assert as_lists(found.plan) == as_lists(order.plan)
        assert found.plan.rows.dtype == np.int32
        assert found.plan.request_ids.dtype == np.int64
        assert as_lists(found.contexts) == as_lists(order.contexts)


@pytest.mark.parametrize("wrong", ["changed", "lost", "doubled"])
def test_a_plan_of_another_digest_is_refused(wrong: str) -> None:
    lead, worker = PlanChain(), PlanChain()
    sent = [lead.seal(an_order(number)) for number in range(3)]
    if wrong == "changed":
        changed = an_order(1)
        changed.plan.rows[2] = 0
        sent[1] = Launch(PlanChain().seal(changed).order, sent[1].digest)
    arrived = {"changed": sent, "lost": [sent[0], sent[2]], "doubled": [sent[0], sent[0]]}[wrong]
    worker.verify(arrived[0])
    with pytest.raises(RankLost, match=r"the plan of batch \d is not the one that rank 0 launched: expected digest"):
        worker.verify(arrived[1])


# ------------------------------------------------------------------------------ orders of executors, without processes


class Inbox:
    """`worker.Orders` of a thread: the process survives their end."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def next(self) -> Any:
        return self.channel.receive()

    def mask(self) -> Mask:
        message = self.next()
        assert isinstance(message, Mask)
        return message


def test_orders_of_other_threads_that_come_before_a_mask_are_carried_out_behind_it() -> None:
    """Links of prefill and decode engines order copies, and adapters are read, while a plan waits for its mask."""
    ours, theirs = socket.socketpair()
    lead, orders = Channel(ours, ToLead, 120.0), Orders(Channel(theirs, ToWorker, 120.0))
    orders.leave = lambda: None  # type: ignore[method-assign]
    others = [
        FetchPages(1, 0, Fetch(0, 1, 0, np.zeros(1, np.int32))),
        ReadAdapter(2, "a", 1, "folder"),
        CloseTransfers(0),
    ]
    for message in (*others[:2], Mask(3, None), others[2], Mask(2, None), Sample(4), Sample(5)):
        lead.send(message)
    masks = SentMasks(orders)  # type: ignore[arg-type]
    assert masks.allowed(np.zeros(3, np.int32)) is None
    assert masks.allowed(np.zeros(2, np.int32)) is None
    assert [type(orders.next()) for _ in others] == [type(one) for one in others]
    with pytest.raises(RankLost, match="rank 0 sent Sample where Mask was due"):
        masks.allowed(np.zeros(1, np.int32))
    assert orders.next() == Sample(5)
    lead.close()


NOTHING_LIVE: Any = SimpleNamespace(version=0, model=SimpleNamespace(device=torch.device("cpu")))
"""A model with fixed weights, memory and adapters."""


class OneThread:
    """`RankGroup` with one worker, a thread that has the whole model: the orders that it receives are compared."""

    def __init__(self, runtime: SmallRuntime, run_at: Any) -> None:
        ends = socket.socketpair()
        self.channel = Channel(ends[0], ToLead, 120.0)
        self.inbox: Any = Inbox(Channel(ends[1], ToWorker, 120.0))
        executor = make_executor(runtime.config, CpuLane(runtime.clock, run_at=run_at), matchers=SentMasks(self.inbox))
        self.errors: list[BaseException] = []
        self.batches = 0
        self.chain = PlanChain()
        self._thread = threading.Thread(target=self._follow, args=(Follower(executor, self.inbox, NOTHING_LIVE),))
        self._thread.start()
        runtime.host.executor = LeadExecutor(runtime.executor, self)  # type: ignore[arg-type]

    def _follow(self, follower: Follower) -> None:
        try:
            follower.run()
        except BaseException as error:
            self.errors.append(error)
            self.inbox.channel.close()

    def check(self) -> None:
        pass

    def explain(self, error: DeviceLost) -> DeviceLost:
        return error

    def launch(self, order: Order) -> None:
        self.tell(self.chain.seal(order))

    def tell(self, message: Any) -> None:
        self.channel.send(message)

    def check_sampled(self, result: BatchResult) -> None:
        said = self.channel.receive()
        assert said == Collected(result.plan.batch_id, drawn_digest(result)), self.errors
        self.batches += 1

    def close(self) -> None:
        if not self.errors:
            self.channel.send(StopWorker())
        self._thread.join(120)
        self.channel.close()
        self.inbox.channel.close()
        assert not self._thread.is_alive()


@pytest.mark.parametrize("run_at", ["launch", "collection"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_workers_sample_under_the_masks_of_rank_0(depth: int, run_at: Any) -> None:
    runtime = SmallRuntime(
        run_at=run_at,
        overlap_depth=depth,
        retract_every=3,
        matchers=Alternating(),
        requests=RequestServices(compile_grammar=lambda command, answer: answer("")),
    )
    group = OneThread(runtime, run_at)
    grammar = Grammar("regex", "alternating", b"digest of sixteen")
    bound = [runtime.submit([n, 2, 3], 12, grammar=grammar) for n in range(4)]
    free = runtime.submit([9, 9], 12)
    runtime.run()
    group.close()
    assert free.tokens == alone([9, 9], 12)
    for answer in bound:
        assert [token % 2 for token in answer.tokens] == [n % 2 for n in range(len(answer.tokens))]
    assert group.batches == runtime.host.batches > 12


class Counting(Alternating):
    """A grammar in which a multiple of three is followed by its two successors."""

    def forced(self, row: int, token: int) -> list[int]:
        following = [token + 1, token + 2]
        return following if token % 3 == 0 and token + 2 < VOCABULARY and all(n % 10 for n in following) else []


def test_workers_are_given_what_is_forced() -> None:
    runtime = SmallRuntime(
        jump_forward_tokens=4,
        overlap_depth=0,
        retract_every=5,
        matchers=Counting(),
        requests=RequestServices(compile_grammar=lambda command, answer: answer("")),
    )
    group = OneThread(runtime, "launch")
    grammar = Grammar("regex", "alternating", b"digest of sixteen")
    bound = [runtime.submit([n, 2, 3], 12, grammar=grammar) for n in range(4)]
    free = runtime.submit([9, 9], 12)
    runtime.run()
    group.close()
    assert free.tokens == alone([9, 9], 12)
    assert runtime.host.drafts.forced > 4
    for answer in bound:
        assert [token % 2 for token in answer.tokens] == [n % 2 for n in range(len(answer.tokens))]
    assert group.batches == runtime.host.batches


def test_a_worker_refuses_what_rank_0_did_not_plan() -> None:
    runtime = SmallRuntime()
    group = OneThread(runtime, "launch")
    sealed = group.chain.seal(an_order(0))
    group.tell(msgspec.structs.replace(sealed, digest=bytes(16)))
    group._thread.join(120)
    group.close()
    assert [type(error) for error in group.errors] == [RankLost]
