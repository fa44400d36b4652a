"""A whole engine over weights and KV in fewer bits: the tokens of a widened copy, whatever rows run beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.journal.reader import read_journal  # noqa: E402
from lockstep.core.journal.replay import replay  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.llm import demo_folder  # noqa: E402
from lockstep.runtime.models import packed, read_settings  # noqa: E402
from tests.runtime.test_quantized import QWEN3, folder_of  # noqa: E402
from tests.support.adapters import write_adapter  # noqa: E402
from tests.support.quantize import write  # noqa: E402
from tests.support.weights import other_weights  # noqa: E402

CPU: dict[str, Any] = {"device": "cpu", "grammar_backend": "none"}
PROMPTS = [f"{start} {number}" for number in range(8) for start in ("def f(", "import ", "class A", "The list is")]
GREEDY = Params(max_new_tokens=8, ignore_eos=True)
Folders = dict[str, tuple[Path, Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The demo model stored in three ways, each beside its widened copy."""
    where, made = tmp_path_factory.mktemp("quantized"), {}
    for kind in ("fp8", "awq", "gptq"):
        stored, widened = where / kind, where / f"{kind}-widened"
        made[kind] = (write(demo_folder(), kind, stored, widened=widened), widened)
    return made


def said(model: Path, prompts: list[str] = PROMPTS, params: Params = GREEDY, **more: Any) -> list[list[int]]:
    with LLM(model, **CPU, **more) as llm:
        answers = llm.generate(prompts, params)
    assert not [answer.error for answer in answers if answer.error]
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("kind", ["fp8", "awq", "gptq"])
def test_32_requests_answer_as_the_widened_model(kind: str, folders: Folders, tmp_path: Path) -> None:
    stored, widened = folders[kind]
    expected = said(widened)
    assert len({tuple(one) for one in expected}) > 16
    assert said(stored, journal=tmp_path / "run", overlap_depth=1, chunked_prefill_size=16) == expected
    assert replay(tmp_path / "run").steps
    assert "kv_cache_dtype" not in read_journal(tmp_path / "run").header.host


def test_two_ranks_give_what_one_gives(folders: Folders) -> None:
    stored, widened = folders["awq"]
    assert said(stored, PROMPTS[:4], tp=2) == said(widened, PROMPTS[:4])


def test_ranks_that_cut_a_group_are_one_error_before_any_begins(tmp_path: Path) -> None:
    folder = write(folder_of(tmp_path / "model", QWEN3), "gptq, symmetric", tmp_path / "stored")
    assert read_settings(folder).quantization is not None
    with pytest.raises(
        ConfigError, match=r"2 cuts `down_proj`: on a rank its 48 inputs .*`quantization_config.group_size` 32"
    ):
        LLM(folder, tp=2, **CPU)


def test_adapters_on_quantised_weights(folders: Folders, tmp_path: Path) -> None:
    stored, widened = folders["gptq"]
    adapters = {"tone": write_adapter(tmp_path / "tone", 1)}
    each = [Params(max_new_tokens=6, ignore_eos=True, adapter="tone" if n % 2 else "") for n in range(4)]
    with LLM(stored, lora=adapters, **CPU) as one, LLM(widened, lora=adapters, **CPU) as other:
        found, expected = ([a.token_ids for a in llm.generate(PROMPTS[:4], each)] for llm in (one, other))
    assert found == expected
    assert found[1] != said(stored, PROMPTS[1:2], Params(max_new_tokens=6, ignore_eos=True))[0]


def test_other_weights_of_the_same_kind_come_in_while_it_serves(folders: Folders, tmp_path: Path) -> None:
    stored, _ = folders["awq"]
    newer = write(other_weights(tmp_path / "other", 1), "awq", tmp_path / "newer", widened=tmp_path / "widened")
    with LLM(stored, **CPU) as llm:
        before = [one.token_ids for one in llm.generate(PROMPTS[:4], GREEDY)]
        llm.update_weights(newer)
        after = [one.token_ids for one in llm.generate(PROMPTS[:4], GREEDY)]
        assert after == said(tmp_path / "widened", PROMPTS[:4]) != before
        with pytest.raises(ConfigError, match="`quantization` is None, and of the model that runs awq in groups of 16"):
            llm.update_weights(tmp_path / "other")
        llm.release_memory()
        llm.resume_memory()
        assert [one.token_ids for one in llm.generate(PROMPTS[:4], GREEDY)] == after


def test_the_memory_table_has_the_smaller_weights_and_pages(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "multiplies_bfloat16", lambda: False)  # so no matrix has a packed copy

    def memory(model: Path, **more: Any) -> Any:
        with LLM(model, dtype="bfloat16", start=False, **CPU, **more) as llm:
            return llm.memory

    plain, fp8 = memory(demo_folder()), memory(folders["fp8"][0], kv_cache_dtype="fp8_e4m3")
    layers = plain.weights - 2 * 2048 * 192  # weights other than the embeddings, nearly all of them matrices
    assert plain.weights - fp8.weights == pytest.approx(layers / 2, rel=0.01)
    assert fp8.page * 2 == plain.page
    assert fp8.pages == pytest.approx(2 * plain.pages, rel=0.01)
    rows = dict(line.split("  ", 1) for line in fp8.table().splitlines()[:2])
    assert rows["weights"].strip() == f"{fp8.weights / 2**20:,.0f} MiB"


def test_kv_in_fp8_answers_alike(tmp_path: Path) -> None:
    """Logprobs of the sampled tokens stay close; most tokens equal those without fp8."""
    params = Params(max_new_tokens=12, ignore_eos=True, logprobs=0)
    with LLM(**CPU) as llm:
        expected = llm.generate(PROMPTS[:16], params)
    # Padded as in a graph; every slot is verified before it is read.
    with LLM(kv_cache_dtype="fp8_e4m3", cuda_graphs="eager", journal=tmp_path / "run", debug=True, **CPU) as llm:
        found = llm.generate(PROMPTS[:16], params)
        again = llm.generate(PROMPTS[:16], params)  # with the contents of the cache by now
    assert read_journal(tmp_path / "run").header.host["kv_cache_dtype"] == "fp8_e4m3"
    same, errors = 0, []
    for ours, theirs in zip(found, expected, strict=True):
        pairs = zip(ours.token_ids, theirs.token_ids, ours.logprobs, theirs.logprobs, strict=True)
        for token, other, logprob, without in pairs:
            if token != other:
                break
            same += 1
            errors.append(abs(logprob - without))
    assert same > 0.6 * 16 * 12, same
    assert 1e-5 < max(errors) < 0.4, max(errors)
    assert sum(errors) / len(errors) < 0.04
    assert sum(a.token_ids == b.token_ids for a, b in zip(found, again, strict=True)) >= 14
