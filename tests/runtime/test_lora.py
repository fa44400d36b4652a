"""LoRA: an adapter gives the answers of the model with the adapter merged into it, whatever rows run beside it.

Tolerance: in float32 logprobs differ by less than 1e-3 from those of the merged model, whose sums have another order;
so greedy tokens are the same, or equally likely behind the same tokens.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import RequestAdmitted, RequestArrived  # noqa: E402
from lockstep.core.journal.reader import read_journal  # noqa: E402
from lockstep.core.journal.replay import replay  # noqa: E402
from lockstep.core.scheduler.engine import Engine  # noqa: E402
from lockstep.host.startup import Keeper  # noqa: E402
from lockstep.runtime import LLM, Params, executor  # noqa: E402
from lockstep.runtime.checkpoint import CheckpointError  # noqa: E402
from lockstep.runtime.llm import demo_folder  # noqa: E402
from lockstep.runtime.lora.batch import lay_out  # noqa: E402
from lockstep.runtime.lora.host_cache import HostAdapterCache  # noqa: E402
from lockstep.runtime.lora.slots import LoraSlots, run_once  # noqa: E402
from lockstep.runtime.models import build_model  # noqa: E402
from lockstep.runtime.outputs import RequestOutput  # noqa: E402
from lockstep.sim.catalogue import load_gpu, load_model  # noqa: E402
from lockstep.sim.cost.lora import LoraCost, LoraSpec, slot_bytes  # noqa: E402
from lockstep.sim.cost.parallel import Parallelism  # noqa: E402
from tests.support.adapters import merged, write_adapter  # noqa: E402

CPU: dict[str, Any] = {"device": "cpu", "grammar_backend": "none"}
TOLERANCE = 1e-3
PROMPTS = ["def f(", "import ", "class A", "return "]


def greedy(adapter: str = "", tokens: int = 8) -> Params:
    return Params(max_new_tokens=tokens, ignore_eos=True, logprobs=2, adapter=adapter)


def same(answer: RequestOutput, expected: RequestOutput) -> None:
    """Equal, up to the first place where two tokens almost tie."""
    assert not answer.error
    assert len(answer.token_ids) == len(expected.token_ids)
    pairs = zip(answer.token_ids, expected.token_ids, answer.logprobs, expected.logprobs, strict=True)
    for ours, theirs, logprob, other in pairs:
        assert logprob == pytest.approx(other, abs=TOLERANCE)
        if ours != theirs:
            return


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of several ranks, of all matrices or some."""
    where = tmp_path_factory.mktemp("adapters")
    return {
        "all": write_adapter(where / "all", 1),
        "few": write_adapter(where / "few", 2, rank=2, modules=("q_proj", "v_proj")),
        "root": write_adapter(where / "root", 3, rank=9, alpha=6, use_rslora=True, modules=("down_proj", "o_proj")),
    }


@pytest.fixture(scope="module")
def expected(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RequestOutput]]:
    """The answers of the merged models, and of the model alone."""
    where, said = tmp_path_factory.mktemp("merged"), {}
    for name, folder in {"": None, **adapters}.items():
        with LLM(merged(where / name, folder) if folder else demo_folder(), **CPU) as llm:
            said[name] = llm.generate(PROMPTS, greedy())
    return said


def test_adapters_report_what_merged_models_report_alone_and_in_one_batch(
    adapters: dict[str, Path], expected: dict[str, list[RequestOutput]], tmp_path: Path
) -> None:
    with LLM(lora=adapters, journal=tmp_path, max_loras=4, chunked_prefill_size=16, debug=True, **CPU) as llm:
        for name, answers in expected.items():
            for answer, other in zip(llm.generate(PROMPTS, greedy(name)), answers, strict=True):
                same(answer, other)
        names = [name for _ in PROMPTS for name in expected]
        prompts = [prompt for prompt in PROMPTS for _ in expected]
        together = llm.generate(prompts, [greedy(name) for name in names])
        for answer, name, prompt in zip(together, names, prompts, strict=True):
            same(answer, expected[name][PROMPTS.index(prompt)])
    said = {tuple(token for answer in answers for token in answer.token_ids) for answers in expected.values()}
    assert len(said) == len(expected)  # otherwise the comparison shows nothing
    assert replay(tmp_path).steps


def test_sixteen_adapters_in_four_slots_answer_like_merged_models_and_no_request_starves(tmp_path: Path) -> None:
    folders = {f"a{n:02}": write_adapter(tmp_path / f"a{n:02}", n, rank=1 + n % 6) for n in range(16)}
    asked = [(f"a{(7 * n) % 16:02}", PROMPTS[n % 4]) for n in range(200)]
    passed_at_most = 24
    settings = {"max_loras": 4, "bypass_limit": passed_at_most, "max_running_requests": 8}
    with LLM(lora=folders, journal=tmp_path / "run", **settings, **CPU) as llm:
        answers = llm.generate([prompt for _, prompt in asked], [greedy(name, 4) for name, _ in asked])
        assert llm.stats().engine.counts.retractions == 0
    for name, folder in folders.items():
        with LLM(merged(tmp_path / f"merged-{name}", folder), **CPU) as llm:
            expected = dict(zip(PROMPTS, llm.generate(PROMPTS, greedy("", 4)), strict=True))
        for answer, (adapter, prompt) in zip(answers, asked, strict=True):
            if adapter == name:
                same(answer, expected[prompt])
    assert replay(tmp_path / "run").steps
    assert most_passed(tmp_path / "run") <= passed_at_most + settings["max_running_requests"]


def most_passed(run: Path) -> int:
    """The largest number of later arrivals that started before one request."""
    engine, came, started = Engine(read_journal(run).header.config), list[int](), dict[int, int]()
    for record in read_journal(run).events():
        if isinstance(record.event, RequestArrived):
            came.append(record.event.request_id)
        for event in engine.step(record.event).decided:
            if isinstance(event, RequestAdmitted):
                started.setdefault(event.request_id, len(started))
    assert sorted(started) == sorted(came)
    order = [started[request_id] for request_id in came]
    return max(sum(later < own for later in order[at:]) for at, own in enumerate(order))


def test_adapters_come_and_go_while_others_stream(
    adapters: dict[str, Path], expected: dict[str, list[RequestOutput]]
) -> None:
    with LLM(lora={"all": adapters["all"]}, max_loras=3, **CPU) as llm:
        over, streams = threading.Event(), []

        def stream() -> None:
            while not over.is_set():
                streams.append(llm.generate(PROMPTS, greedy("all")))

        bystander = threading.Thread(target=stream)
        bystander.start()
        try:
            for _ in range(3):
                assert "few" not in llm.adapters()
                llm.load_adapter("few", adapters["few"])
                assert llm.adapters()["few"] == str(adapters["few"])
                for answer, other in zip(llm.generate(PROMPTS, greedy("few")), expected["few"], strict=True):
                    same(answer, other)
                going = llm.ask(PROMPTS[0], greedy("few"))
                llm.unload_adapter("few")  # returns when no request uses the adapter
                assert going.over.is_set()
                same(llm.wait(going), expected["few"][0])
                (refused,) = llm.generate(PROMPTS[0], greedy("few"))
                assert "'few' is not loaded" in refused.error
        finally:
            over.set()
            bystander.join()
        assert streams
        for answers in streams:
            for answer, other in zip(answers, expected["all"], strict=True):
                same(answer, other)
        with pytest.raises(ConfigError, match="'few' is not loaded"):
            llm.unload_adapter("few")


def test_a_load_holds_up_only_requests_that_wait_for_it(
    adapters: dict[str, Path], expected: dict[str, list[RequestOutput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    place = HostAdapterCache.place

    def slowly(cache: HostAdapterCache, name: str, version: int, slot: int) -> None:
        if name == "few":
            begun.set()
            assert may_end.wait(300)
        place(cache, name, version, slot)

    monkeypatch.setattr(HostAdapterCache, "place", slowly)
    with LLM(lora=adapters, max_loras=3, **CPU) as llm:
        for answer, other in zip(llm.generate(PROMPTS, greedy("all")), expected["all"], strict=True):
            same(answer, other)
        waiting = llm.ask(PROMPTS[0], greedy("few"))
        assert begun.wait(120)
        for answer, other in zip(llm.generate(PROMPTS, greedy("all")), expected["all"], strict=True):
            same(answer, other)
        assert not waiting.over.is_set()
        may_end.set()
        same(llm.wait(waiting), expected["few"][0])


def test_nothing_is_left_of_what_a_slot_held_before(
    adapters: dict[str, Path], expected: dict[str, list[RequestOutput]]
) -> None:
    with LLM(lora=adapters, max_loras=3, **CPU) as llm:
        with torch.no_grad():
            for target in llm.model.targets:
                target.into.down.fill_(torch.inf)
                target.into.up.fill_(torch.inf)
        for name in ("few", "root", ""):
            (answer,) = llm.generate(PROMPTS[0], greedy(name))
            same(answer, expected[name][0])


def test_every_kind_of_product_is_run_before_it_is_needed() -> None:
    model = build_model(demo_folder())
    model.take_adapters(2, 4)
    tiles = set[tuple[int, tuple[int, ...]]]()
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        add_to = LoraSlots.add_to
        patch.setattr(
            LoraSlots,
            "add_to",
            lambda self, out, hidden, batch: (
                tiles.add((batch.tile, self.sizes)) or add_to(self, out, hidden, batch)  # type: ignore[func-returns-value]
            ),
        )
        products = run_once(model.targets, lambda one: torch.from_numpy(one.copy()))
    assert tiles == {(tile, target.into.sizes) for tile in (16, 64) for target in model.targets}
    assert products >= len(tiles)


def test_slots_weigh_what_the_simulator_takes_off_the_pages() -> None:
    model = build_model(demo_folder())
    model.take_adapters(3, 8)
    placed = {id(target.into): target.into for target in model.targets}
    numbers = sum(into.down.numel() + into.up.numel() for into in placed.values())
    priced, alone, spec = load_model(str(demo_folder() / "config.json")), Parallelism(), LoraSpec(3, 8)
    assert 2 * numbers == 3 * slot_bytes(priced, alone, spec)  # of two bytes
    launches = sum(1 + len(into.sizes) for into in placed.values())  # a shrink, and an expand for each part
    assert launches == LoraCost(priced, load_gpu("h200"), alone, spec).kernels


def test_a_newer_version_is_for_later_requests(
    adapters: dict[str, Path], expected: dict[str, list[RequestOutput]]
) -> None:
    with LLM(lora={"tone": adapters["all"]}, max_loras=3, **CPU) as llm:
        (before,) = llm.generate(PROMPTS[0], greedy("tone"))
        assert llm.load_adapter("tone", adapters["few"], pinned=True) == 2
        (after,) = llm.generate(PROMPTS[0], greedy("tone"))
        same(before, expected["all"][0])
        same(after, expected["few"][0])  # of KV of its own, too


def test_ranks_share_an_adapter(
    adapters: dict[str, Path], expected: dict[str, list[RequestOutput]], tmp_path: Path
) -> None:
    with LLM(lora=adapters, max_loras=2, tp=2, journal=tmp_path, **CPU) as llm:
        names = [name for _ in PROMPTS for name in expected]
        prompts = [prompt for prompt in PROMPTS for _ in expected]
        for answer, name, prompt in zip(
            llm.generate(prompts, [greedy(name) for name in names]), names, prompts, strict=True
        ):
            same(answer, expected[name][PROMPTS.index(prompt)])
        with pytest.raises(ConfigError, match="`r` is 17"):
            llm.load_adapter("wide", write_adapter(tmp_path / "wide", 1, rank=17))
        llm.unload_adapter("few")
        llm.load_adapter("few", adapters["root"])
        (again,) = llm.generate(PROMPTS[0], greedy("few"))
        same(again, expected["root"][0])
    assert replay(tmp_path).steps


def test_an_engine_that_begins_again_has_the_adapters_that_it_had(
    adapters: dict[str, Path], expected: dict[str, list[RequestOutput]], tmp_path: Path
) -> None:
    gone = write_adapter(tmp_path / "gone", 5)
    with LLM(lora={"all": adapters["all"]}, max_loras=3, keeper=Keeper(tmp_path / "run"), **CPU) as llm:
        llm.load_adapter("few", adapters["few"])
        llm.load_adapter("gone", gone)
        llm.unload_adapter("all")
    (gone / "adapter_model.safetensors").unlink()
    keeper = Keeper(tmp_path / "run", death="killed")
    with LLM(lora={"all": adapters["all"]}, max_loras=3, keeper=keeper, **CPU) as llm:
        assert sorted(llm.adapters()) == ["few", "gone"]  # adapters that were unloaded stay unloaded
        (answer,) = llm.generate(PROMPTS[0], greedy("few"))
        same(answer, expected["few"][0])
        (lost,) = llm.generate(PROMPTS[0], greedy("gone"))
        assert lost.finish_reason == "error"
        assert "have changed since the adapter was loaded" in lost.error
    with LLM(lora={"all": adapters["all"]}, max_loras=3, keeper=Keeper(tmp_path / "run"), **CPU) as llm:
        assert sorted(llm.adapters()) == ["all", "few", "gone"]  # a restarted server has the adapters of its settings
        (answer,) = llm.generate(PROMPTS[0], greedy("all"))
        same(answer, expected["all"][0])
    assert replay(tmp_path / "run").steps


def test_a_journal_of_digests_names_the_adapters_that_there_were(
    adapters: dict[str, Path], expected: dict[str, list[RequestOutput]], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"lora": {"all": adapters["all"]}, "max_loras": 3, **CPU}
    with LLM(keeper=Keeper(tmp_path, content="digests"), **settings) as llm:
        llm.load_adapter("few", adapters["few"])
        llm.load_adapter("root", adapters["root"])
        llm.unload_adapter("all")
    with LLM(keeper=Keeper(tmp_path, content="digests", death="killed"), **settings) as llm:
        assert sorted(llm.adapters()) == ["few", "root"]
        for name in ("few", "root"):
            (answer,) = llm.generate(PROMPTS[0], greedy(name))
            same(answer, expected[name][0])
        assert sorted(llm.adapters()) == ["few", "root"]


REPEATING = ["the end of the end of the", "one two three one two three one two", "A page is free. A page is"]


@pytest.mark.parametrize("drafts", [{"speculative_method": "ngram"}, {"draft_model": demo_folder()}])
def test_drafts_change_no_token_of_an_adapter(
    adapters: dict[str, Path], drafts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows on adapters and on the model alone, verified in one pass. Adapters are laid out once per pass."""
    settings: dict[str, Any] = {"lora": adapters, "max_loras": 4, "max_running_requests": 8, "dtype": "float32"}
    asked = [(prompt, name) for name in ("", *adapters) for prompt in REPEATING]
    params = [Params(max_new_tokens=24, ignore_eos=True, adapter=name) for _, name in asked]
    with LLM(**settings, **CPU) as llm:
        expected = llm.generate([prompt for prompt, _ in asked], params)

    passes: list[int] = []
    monkeypatch.setattr(
        executor, "lay_out", lambda *given: passes.append(llm._live.executor.forwards) or lay_out(*given)
    )
    more = {"overlap_depth": 1, "retract_every": 9, "debug": True, "journal": tmp_path}
    with LLM(**settings, **drafts, **more, **CPU) as llm:
        found = llm.generate([prompt for prompt, _ in asked], params)
        counts = llm.stats().drafts
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert counts.right > 20
    assert len(passes) == len(set(passes)) > 20
    assert replay(tmp_path).steps


def changed(folder: Path, **settings: Any) -> Path:
    """A folder with other settings."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def test_everything_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "wrong", 1, modules=("q_proj", "o_proj"))
    layer = "base_model.model.model.layers.0"
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors[f"{layer}.self_attn.q_proj.lora_B.weight"]
    tensors[f"{layer}.self_attn.o_proj.lora_A.weight"] = torch.zeros(3, 7)
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "adapter_model.safetensors")
    changed(
        folder,
        bias="all",
        use_dora=True,
        modules_to_save=["lm_head"],
        target_modules=["q_proj", "w1"],
        init_lora_weights="pissa",
        rank_pattern={"q.*": 2},
    )
    with LLM(max_loras=2, **CPU) as llm:
        with pytest.raises(CheckpointError) as caught:
            llm.load_adapter("wrong", folder)
        named = "\n".join(caught.value.problems)
        for said in (
            "`bias` is 'all'",
            "`use_dora` is True",
            "`modules_to_save` is ['lm_head']",
            "`init_lora_weights` is 'pissa'",
            "`rank_pattern` has 'q.*'",
            "layers.0.self_attn.q_proj.lora_B.weight: missing",
            "layers.0.self_attn.o_proj.lora_A.weight: expected [4, ",
            "base_model.model.lm_head.lora_A.weight: not of a matrix",
            "`target_modules` has 'w1'",
        ):
            assert said in named
        assert len(caught.value.problems) == 9
        pickled = write_adapter(tmp_path / "pickled", 1)
        (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
        with pytest.raises(CheckpointError, match=r"adapter_model\.bin is a pickle"):
            llm.load_adapter("pickled", pickled)
        with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
            llm.load_adapter("nowhere", tmp_path / "nowhere")
        assert llm.adapters() == {}
    with LLM(**CPU) as llm, pytest.raises(ConfigError, match="LoRA is off"):
        llm.load_adapter("wrong", folder)
