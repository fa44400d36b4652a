"""`make gpu-check` on a machine without a GPU: every section runs, at sizes that allow no conclusions on times."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from benchmarks.gpu_check import attention_times, breakdown, shapes, tables  # noqa: E402
from benchmarks.gpu_check.__main__ import (  # noqa: E402
    BUDGET_S,
    IF_ASKED,
    ROOT,
    SECTIONS,
    UNCHECKED,
    in_process,
    share_s,
    status_of,
    verdict,
)
from benchmarks.gpu_check.report import markdown  # noqa: E402
from benchmarks.gpu_check.section import Section, write_json  # noqa: E402
from tests.support.interpreter import mend_products  # noqa: E402

CPU = torch.device("cpu")


def section(name: str, folder: Path, small: bool = True, limit_s: float = 100.0) -> Section:
    return Section(name, CPU, small, folder, folder / f"{name}.json", limit_s)


def reported(*sections: Section) -> dict[str, Any]:
    """The report of a whole run."""
    found = {one.name: json.loads(one.part.read_text()) for one in sections}
    return {"commit": "abc", "device": "cpu", "small": True, "budget_s": 530.0, "seconds": 1.0, "sections": found}


@pytest.mark.parametrize("name", [name for name in SECTIONS if name not in ("peer", "tables", "tuning", "families")])
def test_a_section_runs_without_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("triton") is not None:
        mend_products(monkeypatch)
    one = section(name, tmp_path)
    importlib.import_module(f"benchmarks.gpu_check.{name}").run(one)
    assert one.failures == {}
    assert [check for check in one.checks if not check.ok] == []
    assert one.figures or one.checks
    report = reported(one)
    page = markdown(report)
    assert "no figure here means anything" in page
    assert f"| {name} |" in page
    assert verdict(report["sections"][name]).startswith(f"{len(one.checks)} checks passed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_reported_as_checked(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, "--device", "cuda"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        pytest.skip("a package for GPUs is missing, which is reported first")
    assert done.returncode == UNCHECKED
    assert "finds no CUDA device: nothing was checked\nhint: " in done.stderr
    assert not (tmp_path / "out").exists()


def test_with_strict_a_skipped_check_is_an_exit_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    passed = {"checks": [{"name": "a", "ok": True}], "seconds": 1.0}
    skipped = {**passed, "skipped": {"flashinfer": "it is not installed"}}
    failed = {"checks": [{"name": "b", "ok": False}], "seconds": 1.0}
    assert status_of([passed, skipped], strict=False) == 0
    assert status_of([passed], strict=True) == 0
    assert status_of([passed, skipped], strict=True) == UNCHECKED
    assert capsys.readouterr().err == "--strict: 1 checks were skipped, see the report\n"
    assert status_of([skipped, failed], strict=True) == 1


def test_the_engine_is_held_against_the_reference(tmp_path: Path) -> None:
    """Tokens that are not the best by the reference's logits are found."""
    from benchmarks.gpu_check.engine import regret
    from lockstep.runtime.models import build_model

    torch.manual_seed(0)
    model = build_model(shapes.TINY, None, CPU, random_weights_seed=1)
    with torch.no_grad():
        model.head.weight.mul_(50)
    prompt, said = [5, 6, 7], [9]
    worst = regret(model, prompt, said)
    best = min(range(300), key=lambda token: regret(model, prompt, [token]))
    assert regret(model, prompt, [best]) == 0.0
    assert worst > 0.1


def test_kernels_off_by_little_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu_check import kernels
    from lockstep.runtime.attention.reference import ReferenceAttention

    case = kernels.Case("reference", "fast", torch.float32, 4, 4, 2, 16)
    one = section("kernels", tmp_path)
    assert kernels.distance(one, case, "mixed") < 1e-6
    right = ReferenceAttention.run

    def wrong(self: Any, layer: int, query: Any, key: Any, value: Any, batch: Any) -> Any:
        out = right(self, layer, query, key, value, batch)
        if query.dtype == torch.float32:
            out[-1] *= 1.001
        return out

    monkeypatch.setattr(ReferenceAttention, "run", wrong)
    assert kernels.distance(one, case, "mixed") == pytest.approx(1e-3, rel=0.01)


def test_a_section_that_is_stopped_keeps_what_it_found(tmp_path: Path) -> None:
    arguments = argparse.Namespace(out=tmp_path, device="cpu", small=True)
    found = in_process("machine", 0.5, tmp_path / "part.json", arguments)
    assert found["ended"].startswith("stopped after 0 s, while at: ")
    assert verdict(found).startswith("FAILED: stopped after 0 s")
    found = in_process("no_such_section", 60.0, tmp_path / "other.json", arguments)
    assert "ModuleNotFoundError" in (found.get("log", "") + str(found.get("failures")))


def test_every_section_gets_a_fair_share_of_the_time() -> None:
    """Even if each takes its maximum; the first sections, which are the most valuable, get their maximum."""
    names = [name for name in SECTIONS if name not in IF_ASKED]
    left_s, shares = BUDGET_S, {}
    for number, name in enumerate(names):
        shares[name] = share_s(name, names[number + 1 :], left_s)
        left_s -= shares[name]
    assert left_s == pytest.approx(0.0, abs=1e-6)
    assert [shares[name] for name in names[:2]] == [SECTIONS[name] for name in names[:2]]
    assert all(shares[name] >= SECTIONS[name] / 2 - 1e-6 for name in names)
    assert share_s("kernels", [], 500.0) == SECTIONS["kernels"]
    assert share_s("kernels", ["engine"], 24.0) == pytest.approx(12.0)


def test_no_launch_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode is on during launches and samples, off elsewhere and after a failed one."""
    from benchmarks.gpu_check.engine import forbid_waits

    modes: list[str] = []

    class Device:
        def launch(self, plan: int, *, deferred: bool = False) -> str:
            modes.append(f"launched {plan} {deferred}")
            return "done"

        def sample(self) -> None:
            raise ZeroDivisionError

        def collect(self) -> None:
            modes.append("collected")

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    device = Device()
    forbid_waits(device)
    assert device.launch(7, deferred=True) == "done"
    device.collect()
    with pytest.raises(ZeroDivisionError):
        device.sample()
    assert modes == ["error", "launched 7 True", "default", "collected", "error", "default"]


def test_what_a_step_raises_is_kept_and_the_next_goes_on(tmp_path: Path) -> None:
    one = section("decode", tmp_path, limit_s=50.0)
    with one.trying("first"):
        one.put("a.b", 1)
        raise RuntimeError("the kernel is wrong")
    with one.trying("second"):
        one.needs(99.0)
        raise AssertionError("there is no time for it")
    with one.trying("third"):
        one.check("c", False, "off by 3")
    kept = json.loads(one.part.read_text())
    assert kept["figures"] == {"a": {"b": 1}}
    assert kept["failures"]["first"].startswith("RuntimeError: the kernel is wrong")
    assert kept["skipped"]["second"].startswith("no time: ")
    assert verdict(kept) == "FAILED: c, first, 1 skipped"
    page = markdown(reported(one))
    assert "## Failure: decode, first" in page
    assert "| decode | c | off by 3 |" in page


def test_a_backend_that_cannot_run_here_is_skipped_and_one_that_errs_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu_check import kernels
    from lockstep.runtime import attention

    case = kernels.Case("flashinfer", "fast", torch.bfloat16, 16)
    one = section("kernels", tmp_path)
    monkeypatch.setitem(
        attention.UNAVAILABLE_BECAUSE, "flashinfer", lambda needs: "a trial failed: MissingJITCacheError: no module"
    )
    kernels.attention(one, case)
    why = "`attention_backend` flashinfer cannot run here: a trial failed: MissingJITCacheError: no module"
    assert one.skipped == {case.name: why}
    assert one.checks == []
    monkeypatch.setitem(
        attention.UNAVAILABLE_BECAUSE, "flashinfer", lambda needs: "a trial with bfloat16 gives wrong results"
    )
    kernels.attention(one, case)
    assert [(check.name, check.ok) for check in one.checks] == [(case.name, False)]


def test_targets_are_reported_to_be_met_or_missed(tmp_path: Path) -> None:
    decode = section("decode", tmp_path)
    decode.put("targets", {"64": {"ratio": 1.2, "by": "triton, graphs on", "target": 1.25, "met": True}})
    bubbles = section("bubbles", tmp_path)
    shares = {"overlap 0": 0.11, "overlap 1": 0.03, "target": 0.02, "met": False, "how": "by events"}
    bubbles.put("targets", {"256": shares})
    page = markdown(reported(decode, bubbles))
    assert "| decode step at 64 rows, times the floor | <= 1.25 | 1.2 by triton, graphs on | met |" in page
    measured = "overlap 0 11.00%, overlap 1 3.00%, by events"
    assert f"| GPU idle between decodes, 256 requests | < 2% | {measured} | **MISSED** |" in page


def test_the_idle_target_is_held_against_kernels_where_there_was_a_profile(tmp_path: Path) -> None:
    """Events count a device that waits for launches as busy."""
    from benchmarks.gpu_check import bubbles

    one = section("bubbles", tmp_path)
    one.put("runs.64", {"overlap 1": {"idle_share": 0.001}, "overlap 2": {"idle_share": None}})
    bubbles.targets(one, (64,))
    found = {"overlap 1": 0.001, "target": 0.02, "met": True, "how": "by events"}
    assert one.figures["targets"] == {"64": found}
    one.put("profiled.64", {"overlap 1": {"idle_share": 0.05}})
    bubbles.targets(one, (64,))
    assert one.figures["targets"] == {"64": {**found, "overlap 1": 0.05, "met": False, "how": "by kernels"}}


def test_decodes_in_the_middle_of_a_run_are_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's real profiler, on CPU operations in place of kernels: the planned decodes, not the first ones."""
    from benchmarks.gpu_check.served import serve
    from lockstep.runtime.models import build_model

    monkeypatch.setattr(breakdown, "ON_DEVICE", ("cpu_op",))
    one = section("bubbles", tmp_path)
    model = build_model(shapes.TINY, None, CPU, random_weights_seed=0)

    def profiled(tokens: int) -> list[breakdown.Kernel]:
        activity = torch.profiler.ProfilerActivity.CPU
        profile = breakdown.DecodeProfile(tmp_path / "trace.json", 6, activity)
        serve(
            one, model, "reference", prompt_tokens=[9] * 2, output_tokens=[tokens] * 2, overlap_depth=1, profile=profile
        )
        return profile.kernels()

    kernels = profiled(16)
    draws = [name for name, _, _ in kernels if name == "aten::embedding"]
    assert len(draws) == 6
    with pytest.raises(RuntimeError, match="8 decodes are too few to profile 6 behind 5"):
        profiled(9)
    with pytest.raises(RuntimeError, match="the profiler saw nothing on the device"):
        breakdown.summary([], 6)


def test_a_trace_is_added_up_by_kind(tmp_path: Path) -> None:
    """Two steps of two streams; a copy runs beside a product, and for a tenth of the time nothing runs."""
    trace = {
        "traceEvents": [
            {"cat": "kernel", "name": "nvjet_hsh_64x8", "ts": 100.0, "dur": 40.0},
            {"cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 120.0, "dur": 10.0},
            {"cat": "kernel", "name": "attend_split", "ts": 150.0, "dur": 30.0},
            {"cat": "kernel", "name": "merge", "ts": 180.0, "dur": 10.0},
            {"cat": "kernel", "name": "add_rms_norm_kernel", "ts": 190.0, "dur": 10.0},
            {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 900.0},
        ]
    }
    found = breakdown.summary(breakdown.kernels_of(trace), 2)
    assert (found["us"], found["idle_share"], found["launches"]) == (50.0, 0.1, 2.5)
    assert found["kinds"] == {
        "attention": {"us": 20.0, "launches": 1.0},
        "between products": {"us": 5.0, "launches": 0.5},
        "other": {"us": 5.0, "launches": 0.5},
        "products": {"us": 20.0, "launches": 0.5},
    }
    assert next(iter(found["dearest"])) == "nvjet_hsh_64x8"
    decode = section("decode", tmp_path)
    decode.put("breakdown", {"triton, graphs on": {"64": found}})
    assert "| products | 20 | 0.5 |" in markdown(reported(decode))


def test_tuning_tries_other_constants_and_changes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from benchmarks.gpu_check import tuning
    from lockstep.runtime.attention import triton_backend

    seen = []

    def decode_us(layer: Any, name: str, rows: int, context: int, page_size: int) -> float:
        tiling = triton_backend.decode_tiling(128, torch.bfloat16, 4)
        seen.append((tiling.BLOCK_N, triton_backend.positions_per_tile(128, torch.bfloat16), tiling.num_stages))
        return 10.0

    monkeypatch.setattr(tuning, "decode_us", decode_us)
    monkeypatch.setattr(Section, "gpu", True)
    before = triton_backend.decode_tiling(128, torch.bfloat16, 4)
    one = section("tuning", tmp_path)
    tuning.run(one)
    assert one.failures == {}
    assert len(seen) == len(tuning.TILES) * len(tuning.PROGRAMS_PER_SM) * len(tuning.SHAPES)
    assert {positions for positions, _, _ in seen} == {32, 64, 128}
    assert all(positions == same for positions, same, _ in seen)
    assert triton_backend.decode_tiling(128, torch.bfloat16, 4) == before
    assert "## Decode attention by tile" in markdown(reported(one))


def test_the_command_gathers_sections(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--small", "--out", tmp_path]
    done = subprocess.run([*command, "--only", "machine"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(report["sections"]) == ["machine"]
    assert report["sections"]["machine"]["skipped"] == {"launches": "they are what a GPU has"}
    assert (tmp_path / "gpu_check.md").read_text().startswith("# GPU check\n")
    done = subprocess.run([*command, "--only", "magic"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"no section magic; there are {', '.join(SECTIONS)}\n")


def test_what_lacks_is_reported_before_anything_runs(tmp_path: Path) -> None:
    """In one message, with the remedy; also if a package is installed and cannot be loaded."""
    (tmp_path / "msgspec.py").write_text("raise ImportError('msgspec._core is of another Python')")
    (tmp_path / "tokenizers.py").write_text("import no_such_thing")
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--small", "--out", tmp_path / "out"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[1:3] == [
        "  msgspec: ImportError: msgspec._core is of another Python",
        "  tokenizers: ModuleNotFoundError: No module named 'no_such_thing'",
    ]
    assert lines[3].endswith("-m pip install 'msgspec>=0.20' 'tokenizers>=0.21'")
    assert "pip install --target carried --only-binary=:all: --python-version 3." in lines[5]
    assert not (tmp_path / "out").exists()


def test_the_packages_that_are_requested_are_those_that_are_imported() -> None:
    """All sections, in a Python of their own; packages that are installed in addition do not count."""
    from benchmarks.gpu_check import needs

    code = f"""
import importlib, sys
for name in {list(SECTIONS)}:
    importlib.import_module(f"benchmarks.gpu_check.{{name}}")
import lockstep.runtime.attention.reference, lockstep.host.text
files = {{name.partition(".")[0]: getattr(one, "__file__", "") or "" for name, one in sys.modules.items()}}
print(*(name for name, file in files.items() if "site-packages" in file))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    of_torch = {"torch", "torchgen", "typing_extensions", "triton", "sympy", "mpmath", "networkx", "filelock", "fsspec"}
    imported = set(done.stdout.split()) - of_torch - {"_distutils_hack", "tqdm"}
    assert imported <= {*needs.PACKAGES}


def test_the_simulator_takes_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shapes of the real model and times by a formula: both calibrations are accepted."""
    pytest.importorskip("zstandard", reason="the simulator is not installed")
    from benchmarks.gpu_check import bubbles

    bubbles.run(section("bubbles", tmp_path))
    monkeypatch.setattr(shapes, "config", lambda section: shapes.QWEN3_8B)
    monkeypatch.setattr(tables, "graph_time_us", lambda run, device, repeats: 100.0)
    monkeypatch.setattr(tables, "decode_us", lambda layer, name, rows, context, page: 10 + rows * context * 1e-3)
    monkeypatch.setattr(tables, "extend_us", lambda layer, name, rows, before, new, page: 20 + rows * new**2 * 3e-5)
    monkeypatch.setattr(tables.torch, "randn", lambda *shape, device: torch.zeros(1))
    one = section("tables", tmp_path, small=False)
    tables.run(one)
    assert one.failures == {}
    assert {check.name: check.ok for check in one.checks} == {
        "calibration of operators is accepted": True,
        "calibration of journal is accepted": True,
    }
    assert one.figures["rows"]["h200__gemm_perf"] == 5 * len(tables.TOKENS)
    assert (tmp_path / "h200-operators.json").is_file()
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) <= 10


def test_a_decode_is_timed_over_enough_memory(tmp_path: Path) -> None:
    """The shapes from config.json alone equal those of the model."""
    from lockstep.runtime.models import build_model

    one = section("tables", tmp_path)
    layer, model = shapes.Layer.of(one), build_model(shapes.TINY, None, CPU, random_weights_seed=0)
    assert (layer.heads, layer.kv_heads, layer.head_dim) == (model.heads, model.kv_heads, model.head_dim)
    stack: Any = model.stack[0]
    weights = (
        stack.attention.qkv.weight, stack.attention.output.weight, stack.mlp.gate_up.weight, stack.mlp.down.weight,
        model.head.weight,
    )  # fmt: skip
    assert layer.products == tuple(tuple(weight.shape) for weight in weights)
    assert attention_times.layer_bytes(layer, 10) == 10 * 2 * 2 * 16 * 4
    write_json(tmp_path / "a.json", {"b": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 1}
