"""Weights changed below running requests, and memory released: every token is of one version, and nothing is left over.

The tokens of a version come from a model that has no other weights, token by token: the likeliest one behind all tokens
before it, or, as sums of a CPU depend on the batch in their last bits, one that is as likely.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from safetensors.torch import load_file, save, save_file  # noqa: E402
from torch import distributed as dist  # noqa: E402

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import ControlRequested, ReleaseMemory, UpdateWeights, WeightsSwapped  # noqa: E402
from lockstep.core.journal.records import JournalHeader  # noqa: E402
from lockstep.core.journal.replay import replay  # noqa: E402
from lockstep.host.durable import HostImage  # noqa: E402
from lockstep.host.loop import HostClock, RuntimeHost  # noqa: E402
from lockstep.host.services import DeviceServices, EarlierGeneration  # noqa: E402
from lockstep.host.startup import Keeper  # noqa: E402
from lockstep.host.weights import Folder, Group, SharedMemory, WeightsLog, stamp_of, write_source  # noqa: E402
from lockstep.runtime import (  # noqa: E402
    LLM,
    Params,
    weights_group,
)
from lockstep.runtime.live import LiveModel  # noqa: E402
from lockstep.runtime.llm import demo_folder  # noqa: E402
from lockstep.runtime.outputs import RequestOutput  # noqa: E402
from lockstep.runtime.ranks import LeadModel  # noqa: E402
from lockstep.runtime.weights_group import WeightsGroup, check_backend  # noqa: E402
from tests.support.live_server import until  # noqa: E402
from tests.support.small_runtime import SmallRuntime, alone, small_config  # noqa: E402
from tests.support.weights import other_tensors, other_weights  # noqa: E402

CPU = {"device": "cpu", "numerics": "invariant"}
AS_LIKELY = 1e-3
PROMPTS = ["def f(", "import ", "class A", "return "]
GREEDY = Params(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Version 0 and two others."""
    where = tmp_path_factory.mktemp("weights")
    return [demo_folder(), *(other_weights(where / f"step-{seed}", seed) for seed in (1, 2))]


@pytest.fixture(scope="module")
def judges(folders: list[Path]) -> Iterator[list[LLM]]:
    """A model for each version, with no other weights ever."""
    made = [LLM(folder, **CPU) for folder in folders]
    yield made
    for one in made:
        one.close()


def judge(judges: list[LLM], answers: list[RequestOutput], folder_of: Callable[[int], int]) -> None:
    """Every token of every answer is that of its version behind the tokens before it."""
    for number, llm in enumerate(judges):
        wanted = []
        for answer in answers:
            firsts = [first for first, _ in answer.weights]
            assert firsts == sorted(set(firsts))
            assert firsts[:1] == [0]
            for (first, version), stop in zip(answer.weights, [*firsts[1:], len(answer.token_ids)], strict=True):
                if folder_of(version) == number and first < stop:
                    wanted.append((answer, first, stop))
        judged = llm.generate(
            [answer.prompt_token_ids + answer.token_ids[:stop] for answer, _, stop in wanted] or [[1]],
            Params(max_new_tokens=0, prompt_logprobs=1),
        )
        for (answer, first, stop), one in zip(wanted, judged, strict=False):
            for at in range(len(answer.prompt_token_ids) + first, len(answer.prompt_token_ids) + stop):
                best = max(one.prompt_top_logprobs[at].values())
                assert one.prompt_logprobs[at] >= best - AS_LIKELY, (answer.weights, at)


class Gate(SimpleQueue[Any]):
    """Takes tokens of streams; the engine stops with this number of them until it has received a control.

    So every control arrives in the midst of these streams, also if its sender is late.
    """

    def __init__(self, llm: LLM, tokens: int) -> None:
        self.llm, self.tokens, self.taken = llm, tokens, 0
        self.asked, self._ask = threading.Event(), llm.host.ask

    def put(self, item: Any, *_: Any, **__: Any) -> None:
        """In the engine's thread."""
        self.taken += len(item or ())
        if self.taken >= self.tokens:
            assert self.asked.wait(300)

    @contextmanager
    def open_when_asked(self, kind: type) -> Iterator[None]:
        """Open the gate once the control of this block was received."""

        def ask(control: Any, *more: Any) -> Any:
            answer = self._ask(control, *more)
            if isinstance(control, kind):
                self.asked.set()
            return answer

        self.llm.host.ask = ask  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.llm.host.ask = self._ask  # type: ignore[method-assign]
            self.asked.set()


def test_under_32_streams_every_token_is_of_one_version(folders: list[Path], judges: list[LLM], tmp_path: Path) -> None:
    prompts = [f"{PROMPTS[i % 4]}{i % 8}" for i in range(32)]
    params = Params(max_new_tokens=16, ignore_eos=True)
    mixed: list[RequestOutput] = []
    modes = ("wait", "retract", "cancel", "in_place")
    with LLM(**CPU, journal=tmp_path / "run", max_running_requests=16, overlap_depth=1) as llm:
        for number, mode in enumerate(modes):
            gate = Gate(llm, 64)
            asked = [llm.ask(prompt, params, tokens=gate) for prompt in prompts]
            until(lambda gate=gate: gate.taken >= gate.tokens, 300)  # type: ignore[misc]
            with gate.open_when_asked(UpdateWeights):
                changed = llm.update_weights(folders[(number + 1) % 3], version=number + 1, mode=mode)  # type: ignore[arg-type]
            assert changed == number + 1
            answers = [llm.wait(one) for one in asked]
            seen = {tuple(version for _, version in answer.weights) for answer in answers if answer.token_ids}
            assert seen <= {(number,), (number + 1,), (number, number + 1)}
            assert ((number, number + 1) in seen) == (mode in ("retract", "in_place")), (mode, seen)
            assert ((number + 1,) in seen) == (mode != "cancel"), (mode, seen)
            assert {answer.finish_reason for answer in answers} == ({"cancelled"} if mode == "cancel" else {"length"})
            if mode == "in_place":  # these continue with KV of both versions, so their tokens are undefined
                mixed += [answer for answer in answers if len(answer.weights) > 1]
            judge(judges, [one for one in answers if one not in mixed], lambda version: version % 3)
        new = [llm.generate([prompts[0]], params)[0] for _ in range(2)]
        assert new[0].token_ids == new[1].token_ids
        judge(judges, new, lambda version: version % 3)
    journal = replay(tmp_path / "run")
    assert journal.steps > 0
    assert mixed


def test_no_prefix_is_shared_across_versions(folders: list[Path], judges: list[LLM]) -> None:
    prompt = list(range(100, 180))
    with LLM(**CPU, page_size=16) as llm:
        for version in range(3):
            cached = [llm.generate([prompt], GREEDY)[0] for _ in range(2)]
            assert [one.cached_tokens for one in cached] == [0, 64]
            judge(judges, cached, lambda version: version)
            if version < 2:
                llm.update_weights(folders[version + 1], mode="in_place")


def test_memory_is_released_in_the_middle_of_streams(judges: list[LLM]) -> None:
    with LLM(**CPU, max_running_requests=4) as llm:
        gate = Gate(llm, 8)
        asked = [llm.ask(prompt, GREEDY, tokens=gate) for prompt in PROMPTS * 4]
        until(lambda: gate.taken >= gate.tokens, 300)
        with gate.open_when_asked(ReleaseMemory):
            llm.release_memory()
        weights = [one.untyped_storage().nbytes() for one in llm.model.parameters()]
        pool = llm._live.pool
        assert sum(weights) + sum(one.untyped_storage().nbytes() for one in (*pool.keys, *pool.values)) == 0
        assert not all(one.over.is_set() for one in asked)
        with pytest.raises(ConfigError, match="released"):
            llm.weights("model.norm.weight")
        llm.resume_memory("kv_cache")
        with pytest.raises(ConfigError, match="released; resume it first"):
            llm.update_weights(demo_folder())
        llm.resume_memory("weights")
        judge(judges, [llm.wait(one) for one in asked], lambda version: 0)


def test_memory_that_is_resumed_at_other_addresses_gives_the_same_tokens(judges: list[LLM]) -> None:
    """docs/contract.md, `ResumeDeviceMemory`: addresses may differ. Here blocks of the same sizes take the old ones."""
    with LLM(**CPU) as llm:
        before = llm.generate(PROMPTS, GREEDY)
        tensors = [*llm.model.parameters(), *llm._live.pool.keys, *llm._live.pool.values]
        addresses = [one.data_ptr() for one in tensors]
        sizes = [one.untyped_storage().nbytes() for one in tensors]
        llm.release_memory()
        taken = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        llm.resume_memory()
        assert [one.data_ptr() for one in tensors] != addresses
        after = llm.generate(PROMPTS, GREEDY)
        assert len(taken) == len(tensors)
        judge(judges, [*before, *after], lambda version: 0)


@pytest.mark.parametrize("tag", ["kv_cache", "weights"])
def test_memory_is_not_released_on_a_gpu_with_cuda_graphs(tag: str) -> None:
    """Graphs hold addresses, which are not the same after a resumption without a saver. Nothing is released."""
    storage = torch.zeros(8)
    pool = SimpleNamespace(release=lambda: storage.untyped_storage().resize_(0))
    executor: Any = SimpleNamespace(attention=SimpleNamespace(pool=pool), graphs=object(), lane=None, canary=None)
    model: Any = SimpleNamespace(
        device=torch.device("cuda"), saver=None, tensors=lambda: iter(()), parameters=lambda: iter((storage,))
    )
    with pytest.raises(ConfigError, match=r"CUDA graphs hold its addresses\nhint: start with --memory-saver"):
        LiveModel(model, executor).switch_memory([tag], released=True)
    assert storage.untyped_storage().nbytes() == 32


def _shorter(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    tensors["model.extra.weight"] = tensors.pop("model.layers.0.input_layernorm.weight")
    save_file(tensors, folder / "model.safetensors")


def _other_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9, "rms_norm_eps": 0.5}))


def _cut(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


WRONG: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "other tensors": (_shorter, ["norm.weight: expected", "input_layernorm.weight: missing", "extra.weight: not a"]),
    "another model": (_other_model, ["`layers` is 9", "`norm_eps` is 0.5"]),
    "a file that is cut": (_cut, ["model.safetensors"]),
    "no folder": (shutil.rmtree, ["has no config.json"]),
}


def test_what_does_not_fit_is_named_and_the_weights_before_stay(folders: list[Path], tmp_path: Path) -> None:
    with LLM(**CPU) as llm:
        before = llm.generate(PROMPTS, GREEDY)
        for number, (spoil, problems) in enumerate(WRONG.values()):
            bad = shutil.copytree(folders[1], tmp_path / str(number))
            spoil(bad)
            with pytest.raises(ConfigError) as raised:
                llm.update_weights(bad)
            for problem in problems:
                assert problem in str(raised.value)
        changed = Folder(str(folders[1]), "0123")
        with pytest.raises(ConfigError, match="have changed since"):
            llm.update_weights(changed)
        after = llm.generate(PROMPTS, GREEDY)
        assert [one.token_ids for one in after] == [one.token_ids for one in before]
        assert {one.weights for one in after} == {((0, 0),)}


def test_tensors_come_over_shared_memory(judges: list[LLM]) -> None:
    shared = pytest.importorskip("multiprocessing.shared_memory")
    tensors = other_tensors(1)
    names = sorted(tensors)
    with LLM(**CPU) as llm:
        for number, some in enumerate((names[:5], names[5:]), 1):
            data = save({name: tensors[name] for name in some})
            memory = shared.SharedMemory(create=True, size=len(data))
            try:
                memory.buf[: len(data)] = data
                if memory.size > len(data):  # pages are whole; a file of safetensors ends with its last tensor
                    os.truncate(f"/dev/shm/{memory.name}", len(data))
                assert llm.update_weights(SharedMemory(memory.name)) == number
            finally:
                memory.close()
                memory.unlink()
        judge(judges, llm.generate(PROMPTS, GREEDY), lambda version: 1)
        for name in ("none-such", "../../etc/passwd"):
            with pytest.raises(ConfigError, match="no shared memory called"):
                llm.update_weights(SharedMemory(name))


def test_tensors_come_over_a_group(judges: list[LLM]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tensors = other_tensors(2)
    told = (tuple(tensors), tuple(str(one.dtype) for one in tensors.values()))
    shapes = tuple(tuple(one.shape) for one in tensors.values())

    def train() -> None:
        group = WeightsGroup("127.0.0.1", port, 0, 2)
        for tensor in tensors.values():
            group.send(tensor)
        left.wait(300)
        group.close()

    left, trainer = threading.Event(), threading.Thread(target=train)
    trainer.start()
    with LLM(**CPU) as llm:
        with pytest.raises(ConfigError, match="joined no group"):
            llm.update_weights(Group("weights", *told, shapes))
        llm.join_group("weights", "127.0.0.1", port, 1, 2)
        with pytest.raises(ConfigError, match=r"embed_tokens.weight: expected"):
            llm.update_weights(Group("weights", *told, ((1,), *shapes[1:])))  # before any data is received
        llm.update_weights(Group("weights", *told, shapes))
        llm.leave_group("weights")
        left.set()
        judge(judges, llm.generate(PROMPTS, GREEDY), lambda version: 2)
    trainer.join()


def test_a_group_over_nccl_is_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="`backend` is nccl, which goes from GPU to GPU, but this end is on cpu"):
        WeightsGroup("127.0.0.1", 29500, 0, 2, backend="nccl")
    with LLM(**CPU, start=False) as llm, pytest.raises(ConfigError, match=r"`backend` is nccl, .* this end is on cpu"):
        llm.join_group("weights", "127.0.0.1", 29500, 1, 2, "nccl")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match=r"`backend` is nccl, .* has none"):
        check_backend("nccl", torch.device("cuda"))
    check_backend("gloo", torch.device("cuda"))


def test_a_group_over_nccl_meets_sends_and_receives_as_one_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL itself is tested by `gpu_check`; here gloo takes its place."""

    def stand_in(store: Any, end: WeightsGroup, address: str, timeout: Any) -> Any:
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        gloo._timeout = timeout
        return dist.ProcessGroupGloo(store, end.rank, end.ranks, gloo)

    monkeypatch.setattr(weights_group, "_nccl_group", stand_in)
    monkeypatch.setattr(weights_group, "check_backend", lambda backend, device: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sent, found = [torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)], []
    cpu = torch.device("cpu")

    def receive() -> None:
        end = WeightsGroup("127.0.0.1", port, 1, 2, backend="nccl", device=cpu)
        found.extend(end.receive(tuple(one.shape), one.dtype) for one in sent)
        end.close()

    engine = threading.Thread(target=receive)
    engine.start()
    trainer = WeightsGroup("127.0.0.1", port, 0, 2, backend="nccl", device=cpu)
    for tensor in sent:
        trainer.send(tensor.t().contiguous().t())
    engine.join(300)
    trainer.close()
    assert all(torch.equal(one, other) for one, other in zip(found, sent, strict=True))
    assert len(found) == 2


def test_an_engine_that_begins_again_has_the_weights_of_its_journal(
    folders: list[Path], judges: list[LLM], tmp_path: Path
) -> None:
    moved = shutil.copytree(folders[1], tmp_path / "moved")
    with LLM(**CPU, keeper=Keeper(tmp_path / "run")) as llm:
        llm.update_weights(moved)
    with LLM(**CPU, keeper=Keeper(tmp_path / "run")) as llm:
        judge(judges, llm.generate(PROMPTS, GREEDY), lambda version: {1: 1}[version])
        with pytest.raises(ConfigError, match="must be above 1"):
            llm.update_weights(folders[2], version=1)
    moved.rename(tmp_path / "away")
    with pytest.raises(ConfigError, match=r"weights 1 .* cannot be loaded again: .* has no config.json"):
        LLM(**CPU, keeper=Keeper(tmp_path / "run"))


# --------------------------------------------------------------------------------------------- a host, without a model


class Doubles:
    """A host's loaders that record their orders."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def load_weights(self, version: int, source: str) -> None:
        self.told.append((version, source))
        if source == "broken":
            raise RuntimeError("the contents of the device are unknown")

    def switch_memory(self, tags: tuple[str, ...], *, released: bool) -> None:
        self.told.append((tags, released))


def test_an_order_that_was_not_answered_is_given_again_behind_a_restart(tmp_path: Path) -> None:
    """Its answer does not reach a later order under the same number."""
    header = JournalHeader(config=small_config())
    engine, journal = Keeper(tmp_path).begin(header)
    ordered = ControlRequested(5, 0, UpdateWeights(3, "there"))
    journal.append(ordered, engine.step(ordered).digest)
    journal.close()

    keeper, doubles = Keeper(tmp_path, death="killed"), Doubles()
    engine, kept = keeper.begin(header)
    device, earlier = DeviceServices(weight_loader=doubles), EarlierGeneration(keeper.weights, orders=keeper.orders)
    clock = HostClock(start_us=keeper.start_us)
    host = RuntimeHost(engine, SmallRuntime(clock=clock).executor, kept, clock, device=device, earlier=earlier)
    told_by_then: list[Any] = []
    asked = host.ask(UpdateWeights(4, "newer"), lambda _: told_by_then.extend(doubles.told))
    host.run(until_idle=True)
    kept.close()
    assert told_by_then == doubles.told
    assert doubles.told == [(3, "there"), (4, "newer")]
    assert asked.result(timeout=0).ok
    assert (host.weights.version, host.weights.source) == (4, "newer")


def test_an_engine_whose_weights_are_unknown_ends() -> None:
    runtime = SmallRuntime(device=DeviceServices(weight_loader=Doubles()))
    asked = runtime.host.ask(UpdateWeights(1, "broken"))
    with pytest.raises(RuntimeError, match="the contents of the device"):
        runtime.host.run()
    assert "the contents of the device" in str(asked.exception(timeout=0))


def test_requests_come_and_go_while_weights_are_loaded() -> None:
    go_on, doubles = threading.Event(), Doubles()
    doubles.load_weights = lambda version, source: go_on.wait(300)  # type: ignore[method-assign,assignment,return-value]
    runtime = SmallRuntime(device=DeviceServices(weight_loader=doubles))
    asked = runtime.host.ask(UpdateWeights(1, "there"))
    thread = threading.Thread(target=runtime.host.run)
    thread.start()
    gone, stays = runtime.submit([1, 2, 3], 5), runtime.submit([4, 5], 5)
    runtime.host.cancel(gone.request_id)
    assert gone.over.wait(120)
    assert (gone.reason, asked.done(), stays.over.is_set()) == ("cancelled", False, False)
    go_on.set()
    assert stays.over.wait(120)
    assert (stays.tokens, asked.result(120).ok) == (alone([4, 5], 5), True)
    assert stays.extras is not None
    assert stays.extras.weights == ((0, 1),)
    runtime.host.stop()
    thread.join()


class OtherRanks:
    """Other ranks, one of which reports an error at a given order."""

    def __init__(self, fails_at: str) -> None:
        self.told: list[str] = []
        self.fails_at = fails_at

    def change(self, message: Any, what: str) -> None:
        self.told.append(type(message).__name__)

    def changed(self, version: int) -> str:
        return "rank 1: no room" if self.told[-1] == self.fails_at else ""


def test_either_all_ranks_change_or_none() -> None:
    done: list[str] = []
    live = SimpleNamespace(
        version=0,
        prepare=lambda source: done.append("prepare"),
        commit=lambda version: done.append("commit"),
        discard=lambda: done.append("discard"),
        switch_memory=lambda tags, released: done.append(f"released {released}"),
    )
    fine: Any = OtherRanks("")
    LeadModel(live, fine).load_weights(1, "there")  # type: ignore[arg-type]
    assert (fine.told, done) == (["Prepare", "Commit"], ["prepare", "commit"])
    done.clear()
    group: Any = OtherRanks("Prepare")
    with pytest.raises(ConfigError, match="rank 1: no room"):
        LeadModel(live, group).load_weights(2, "there")  # type: ignore[arg-type]
    assert (group.told, done) == (["Prepare", "Discard"], ["prepare", "discard"])


def test_two_ranks_take_the_same_weights(folders: list[Path], judges: list[LLM], tmp_path: Path) -> None:
    with LLM(**CPU, tp=2) as llm:
        llm.update_weights(folders[1])
        judge(judges, llm.generate(PROMPTS, GREEDY), lambda version: version)
        bad = shutil.copytree(folders[2], tmp_path / "bad")
        _shorter(bad)
        with pytest.raises(ConfigError, match=r"norm.weight: expected"):
            llm.update_weights(bad)
        llm.release_memory()
        llm.resume_memory()
        judge(judges, llm.generate(PROMPTS, GREEDY), lambda version: version)


def test_a_log_of_weights_follows_what_took_effect(folders: list[Path]) -> None:
    log = WeightsLog()
    engine = SimpleNamespace(
        memory=SimpleNamespace(weights_version=2), requests={7: SimpleNamespace(request_id=7)}, outputs_of=lambda _: 3
    )
    log.requested = {2: write_source(Folder(str(folders[1]), stamp_of(folders[1]))), 3: "later"}
    assert log.fold(engine, WeightsSwapped(0, 2))  # type: ignore[arg-type]
    assert (log.of(7), log.of(8), log.requested) == (((0, 0), (3, 2)), ((0, 2),), {3: "later"})
    stored = msgspec.msgpack.encode(HostImage(weights=log))
    assert msgspec.msgpack.decode(stored, type=HostImage).weights == log
    assert not log.fold(engine, WeightsSwapped(0, 3, "torn"))  # type: ignore[arg-type]
    engine.memory.weights_version = 3
    assert log.fold(engine, WeightsSwapped(0, 3))  # type: ignore[arg-type]
    assert log.of(7) == ((0, 0), (3, 3))  # no token was drawn with the second version
