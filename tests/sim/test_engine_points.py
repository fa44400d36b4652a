"""Points of engines: which runs of a table of measurements a fit gets, and which are left out by their day."""

from __future__ import annotations

import pytest

from benchmarks.engine_points import (
    Condition,
    Settings,
    condition_of,
    measured_on,
    same_load,
    settings_of,
    suspect_by_day,
    warm_ttft,
)


def row(day: str = "2025-11-10", ttft: float = 400.0, **given: str) -> dict[str, str]:
    """Return a row of the table: DeepSeek-R1 in nvfp4 under SGLang on four B200, with fields changed."""
    source = f"db-dump/2026-04-27; silicon_concurrency=4; measured={day}T00:00:00.000Z; workflow_run_id=1"
    usual = {
        "silicon_data_source": source if day else "a paper", "backend": "sglang", "backend_version": "",
        "model_path": "deepseek-ai/DeepSeek-R1", "system": "b200_sxm", "precision": "fp4", "mode": "agg", "isl": "8192",
        "osl": "1024", "batch_size": "4", "tp_size": "4", "pp_size": "1", "attention_dp_size": "1", "moe_tp_size": "4",
        "moe_ep_size": "1", "silicon_ttft_ms": str(ttft), "silicon_tpot_ms": "9",
    }  # fmt: skip
    return {**usual, **given}


def test_the_day_of_a_measurement_is_read_where_it_is_stated() -> None:
    assert measured_on(row()) == "2025-11-10"
    assert measured_on(row(day="")) == ""


def test_first_tokens_with_compilation_are_left_out_and_others_of_that_time_are_not() -> None:
    shared = {"tp_size": "16", "moe_tp_size": "4", "moe_ep_size": "4"}  # four GPUs, stated as the product
    warm = warm_ttft([row("2026-03-25", 317.0, **shared), row("2026-03-25", 900.0), row("2025-12-01", 1.0)])
    assert warm == {same_load(row()): 317.0}
    assert "compilation" in suspect_by_day(row(ttft=5504.0), warm)
    assert not suspect_by_day(row(ttft=900.0), warm)
    assert not suspect_by_day(row("2026-02-01", 5504.0), warm)  # the load generator warmed up
    assert not suspect_by_day(row(ttft=5504.0, batch_size="8"), warm)  # no warm run to compare with
    assert not suspect_by_day(row(day="", ttft=5504.0), warm)


def test_first_tokens_on_b300_are_compared_with_those_of_b200() -> None:
    warm = warm_ttft([row("2026-03-25", 400.0), row("2026-04-17", 2000.0, system="b300_sxm")])
    late = row("2026-04-17", 2000.0, system="b300_sxm")
    assert "slower GPU" in suspect_by_day(late, warm)
    assert not suspect_by_day({**late, "silicon_ttft_ms": "1100"}, warm)
    assert not suspect_by_day({**late, "batch_size": "8"}, warm)  # no run on B200 to compare with
    assert not suspect_by_day(row("2026-04-17", 2000.0), warm)


@pytest.mark.parametrize(("day", "release", "left"), [
    ("2026-01-14", "1.1.0rc2.post2", True), ("2025-12-15", "1.1.0rc2.post2", False), ("2026-02-03", "1.2.0rc6", False),
])  # fmt: skip
def test_runs_with_drafts_are_told_by_their_day(day: str, release: str, left: bool) -> None:
    one = row(day, backend="trtllm", backend_version=release)
    assert isinstance(condition_of(one), Condition)
    assert ("drafts" in suspect_by_day(one, {})) == left


def test_only_one_series_has_a_user_beyond_the_rows_of_its_server() -> None:
    usual = {
        "backend": "trtllm", "backend_version": "1.0.0rc3", "precision": "", "system": "h100_sxm",
        "model_path": "meta-llama/Llama-3.1-8B-Instruct",
    }  # fmt: skip
    one = condition_of(row("", **usual))
    assert isinstance(one, Condition)
    assert settings_of(one).extra_users == 1
    assert settings_of(one._replace(model="qwen3-32b")).extra_users == 0
    assert settings_of(one._replace(engine="vllm")).extra_users == 0


@pytest.mark.parametrize("gpu", ["b200", "b300"])
def test_settings_of_sglang_for_qwen_on_blackwell_are_those_of_the_scripts_in_every_precision(gpu: str) -> None:
    one = condition_of(row("2026-04-08", model_path="Qwen/Qwen3.5-397B-A17B", backend_version="0.5.9"))
    assert isinstance(one, Condition)
    for precision, kv in (("nvfp4", "fp8"), ("fp8", "fp8"), ("bf16", "bf16")):
        there = one._replace(gpu=gpu, precision=precision)
        assert settings_of(there) == Settings(kv, 32768, 10)
        assert settings_of(there._replace(concurrency=16)) == Settings(kv, 32768, 30)
    later = one._replace(gpu="b300", precision="fp8", engine_version="0.5.10.post1", concurrency=16)
    assert settings_of(later) == Settings("fp8", 16384, 10)


def test_a_precision_that_is_not_modelled_is_left_out() -> None:
    kimi = row("2026-03-24", backend="vllm", model_path="moonshotai/Kimi-K2.5", precision="int4")
    assert condition_of(kimi) == "4-bit integers in groups of 32"
    stored = condition_of({**kimi, "precision": "fp4"})
    assert isinstance(stored, Condition)
    assert settings_of(stored).kv_dtype == "fp8"
