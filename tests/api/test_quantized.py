"""A quantised checkpoint with KV in fp8 behind `lockstep serve`: the guide's example, and the output of a dry run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("openai", reason="the OpenAI client is not installed")

from click.testing import CliRunner  # noqa: E402

from lockstep.api.serve import serve  # noqa: E402
from lockstep.core.contract.events import BatchFinished, EngineRestarted  # noqa: E402
from lockstep.core.journal.replay import fold  # noqa: E402
from lockstep.host.quantization import KV_BYTES  # noqa: E402
from lockstep.runtime.llm import demo_folder  # noqa: E402
from lockstep.sim.catalogue import load_gpu, load_model  # noqa: E402
from lockstep.sim.cost.capacity import kv_capacity  # noqa: E402
from tests.support.live_server import serving  # noqa: E402
from tests.support.quantize import write  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "features.md"


def test_the_guides_example_runs_as_printed_over_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ends within the answer; the next generation continues, with weights and KV of the same kind."""
    monkeypatch.setenv("LOCKSTEP_FAULT", "written:4:1:BatchFinished")
    section = PAGE.read_text("utf-8").partition("\n## Quantised weights and KV\n")[2]
    source = section.partition("```python\n")[2].partition("```")[0]
    assert "--kv-cache-dtype fp8_e4m3" in section
    assert "http://127.0.0.1:8000" in source
    folder = write(demo_folder(), "awq", tmp_path / "demo-awq")
    words = (
        "--model",
        str(folder),
        "--kv-cache-dtype",
        "fp8_e4m3",
        "--device",
        "cpu",
        "--journal",
        str(tmp_path / "run"),
    )
    with serving(tmp_path / "log", *words, "--shutdown-s", "1") as server:
        (tmp_path / "example.py").write_text(source.replace("http://127.0.0.1:8000", server.url), "utf-8")
        done = subprocess.run([sys.executable, tmp_path / "example.py"], capture_output=True, text=True, timeout=120)
        assert server.text().count(" s after the end of the previous generation") == 1
        assert "recovered 1 requests" in server.text()
        assert server.end() == 0
    assert done.stdout == "demo-awq 16 tokens\n", done.stdout + done.stderr
    kinds = [type(event) for event, _ in fold(tmp_path / "run")]
    assert BatchFinished in kinds[: kinds.index(EngineRestarted)]
    assert BatchFinished in kinds[kinds.index(EngineRestarted) :]


def test_a_dry_run_shows_the_smaller_weights_and_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.runtime.models.packed.multiplies_bfloat16", lambda: False)  # no packed copies
    folder = write(demo_folder(), "fp8", tmp_path / "demo-fp8")
    words = ["--model", str(folder), "--device", "cpu", "--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3"]
    said = CliRunner().invoke(serve, [*words, "--grammar-backend", "none", "--dry-run"])
    assert said.exit_code == 0, said.output
    plain = (demo_folder() / "model.safetensors").stat().st_size  # all of it bfloat16
    table = 2048 * 192 * 2
    weights = f"{(table + (plain - table) / 2) / 2**20:,.0f} MiB"
    assert re.search(rf"weights +{weights}\n", said.output)
    kib = 16 * 2 * 4 * 2 * 64 * KV_BYTES["fp8"] / 1024  # tokens, keys and values, layers, heads, numbers of each
    assert f"pages of {kib:,.1f} KiB" in said.output
    stored = "weights    fp8 by blocks of 128 x 128, activations dynamic; multiplied with rows in"
    assert f"{stored} bfloat16\n" in said.output  # a CPU multiplies no fp8 by fp8
    rounded = CliRunner().invoke(serve, [*words, "--grammar-backend", "none", "--fp8-activations", "on", "--dry-run"])
    assert f"{stored} fp8, dynamic\n" in rounded.output
    wrong = CliRunner().invoke(serve, ["--device", "cpu", "--fp8-activations", "on", "--dry-run"])
    assert str(wrong.exception).startswith("`fp8_activations` is on, but weights are not quantised")
    refused = CliRunner().invoke(serve, ["--kv-cache-dtype", "fp8", "--dry-run"])
    assert refused.exit_code == 2
    assert "is not one of 'auto', 'fp8_e4m3'" in refused.output


def test_an_emulated_engine_has_the_planners_tokens_of_kv_in_fp8() -> None:
    said = CliRunner().invoke(serve, ["--emulate", "qwen3-8b@h200", "--kv-cache-dtype", "fp8_e4m3", "--dry-run"])
    assert said.exit_code == 0, said.output
    found = re.search(r"KV tokens +([\d,]+)", said.output)
    assert found is not None, said.output
    tokens, model = int(found[1].replace(",", "")), load_model("qwen3-8b")
    without, planned = (kv_capacity(model, load_gpu("h200"), 1, kv_dtype=kind).tokens for kind in ("bf16", "fp8"))
    assert tokens == pytest.approx(planned, rel=0.01)  # of another chunk size
    assert planned == pytest.approx(2 * without, rel=0.001)
