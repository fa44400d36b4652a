"""Operator tables: measured rows are returned as they are, values between them interpolated, values beyond reported."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.sim.catalogue import CatalogueError, load_gpu, load_model
from lockstep.sim.cli.calibrate import calibrate
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.cost import (
    UNCALIBRATED,
    BatchShape,
    CalibratedModel,
    Calibration,
    Parallelism,
    RooflineModel,
    decode_shape,
    extend_shape,
    roofline_model,
)
from lockstep.sim.cost.models import GatedDelta
from lockstep.sim.cost.tables import OPERATORS, Grid, MeasuredModel, Ratios, read_operator_tables, unnoted

DATA = Path(os.environ.get("LOCKSTEP_DATA", "/nowhere")) / "published" / "aic_ops"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="LOCKSTEP_DATA names no folder with published/aic_ops")
ROOT = Path(__file__).resolve().parents[2]
GPU = load_gpu("h100")


def write_tables(
    folder: Path, base: RooflineModel, *, gemm: float = 2.0, decode: float = 3.0, prefix: str = ""
) -> Path:
    """Tables of a card on which every kernel takes a multiple of the roofline."""
    folder.mkdir(exist_ok=True)
    rows = ["gemm_dtype,m,n,k,latency"]
    for m in 2.0 ** np.arange(0, 15):
        for n in 2.0 ** np.arange(9, 17):
            for k in 2.0 ** np.arange(9, 16):
                us = float(base.gemm_us("bf16", m, k, n, 2.0))
                rows.append(f"bfloat16,{m:g},{n:g},{k:g},{gemm * us / 1e3:.9g}")
    (folder / f"{prefix}gemm_perf.csv").write_text("\n".join(rows) + "\n")
    rows = ["batch_size,step,num_heads,num_key_value_heads,head_dim,kv_cache_dtype,latency"]
    for batch in 2.0 ** np.arange(0, 9):
        for context in 2.0 ** np.arange(4, 15):
            us = float(base.one_layer_decode_us(np.array(batch * context), *map(np.array, (32.0, 8.0, 128.0))))
            rows.append(f"{batch:g},{context - 1:g},32,8,128,bfloat16,{decode * us / 1e3:.9g}")
    with gzip.open(folder / f"{prefix}generation_attention.csv.gz", "wt") as file:
        file.write("\n".join(rows) + "\n")
    return folder


@pytest.fixture
def base() -> RooflineModel:
    return roofline_model(load_model("qwen3-8b"), GPU)


def test_every_operator_takes_what_its_table_reports(tmp_path: Path, base: RooflineModel) -> None:
    measured = MeasuredModel(base, read_operator_tables(write_tables(tmp_path, base), GPU))
    for shape in (decode_shape(32, 1000), decode_shape(7, 300)):
        before, after = base.terms_us(shape), measured.terms_us(shape)
        for name in ("qkv", "o", "gate_up", "down"):
            assert after[name] == pytest.approx(2.0 * before[name], rel=1e-6)
        # Latency is per layer in both, so the ratio of one layer is that of all.
        assert after["attention_decode"] == pytest.approx(3.0 * before["attention_decode"], rel=1e-6)
        assert after["small_kernels"] == before["small_kernels"]
        assert sum(after.values()) == pytest.approx(measured.batch_us(shape).mean_us)
    assert measured.extrapolated == set()
    assert measured.without_table == ["attention_prefill"]
    assert measured.describe()["kind"] == "measured"


def test_what_lies_beyond_the_tables_is_reported(tmp_path: Path, base: RooflineModel) -> None:
    measured = MeasuredModel(base, read_operator_tables(write_tables(tmp_path, base), GPU))
    measured.batch_us(decode_shape(8, 60_000))
    assert measured.extrapolated == {"attention_decode"}
    measured.forget()
    measured.batch_us(extend_shape(40_000))
    assert measured.extrapolated == {"qkv", "o", "gate_up", "down"}
    measured.forget()
    measured.batch_us(decode_shape(8, 6000))
    assert measured.extrapolated == set()


def test_shapes_outside_a_run_are_not_noted(tmp_path: Path, base: RooflineModel) -> None:
    measured = MeasuredModel(base, read_operator_tables(write_tables(tmp_path, base), GPU))
    measured.batch_us(extend_shape(40_000))
    before = measured.extrapolated.copy()
    for asked in (measured, CalibratedModel(measured, UNCALIBRATED)):
        with unnoted(asked):
            asked.batch_us(decode_shape(8, 60_000))
            assert measured.extrapolated > before
        assert measured.extrapolated == before
    measured.batch_us(decode_shape(8, 60_000))  # a batch with this shape is
    assert measured.extrapolated > before


def test_a_row_that_is_hit_gives_its_own_ratio_and_between_rows_it_is_between() -> None:
    shapes = np.array([[1.0, 4.0], [4.0, 4.0], [16.0, 4.0]])
    ratios = Ratios(shapes, np.array([1.0, 2.0, 8.0]))
    logs, far = ratios.at(shapes)
    assert np.exp(logs) == pytest.approx([1.0, 2.0, 8.0])
    assert not far.any()
    [log], [far_between] = ratios.at(np.array([[2.0, 4.0]]))
    assert 1.0 < math.exp(log) < 2.0 * 1.2
    assert not far_between
    _, beyond = ratios.at(np.array([[32.0, 4.0], [4.0, 5.0]]))
    assert beyond.all()


def test_a_grid_is_exact_at_its_points_and_bilinear_between() -> None:
    def ratio_of(x: Any, y: Any) -> tuple[Any, Any]:
        return np.log(x) + 2.0 * np.log(y), (y > 8.0)

    grid = Grid(ratio_of, 6, 5)
    for x, y in ((1.0, 1.0), (8.0, 4.0), (3.0, 5.0), (64.0, 32.0)):
        assert grid.at(x, y)[0] == pytest.approx(x * y * y)
    assert grid.at(2.0, 4.0)[1] is False
    assert grid.at(2.0, 16.0)[1] is True
    assert grid.at(100.0, 4.0) == (pytest.approx(64.0 * 16.0), True)


def test_files_of_other_gpus_are_passed_over(tmp_path: Path, base: RooflineModel) -> None:
    write_tables(tmp_path, base, gemm=5.0, prefix="a100_sxm__")
    with pytest.raises(CatalogueError, match="no operator table of H100-SXM"):
        read_operator_tables(tmp_path, GPU)
    write_tables(tmp_path, base, prefix="h100_sxm__mine__")
    tables = read_operator_tables(tmp_path / ".", GPU)  # another path, since folders are cached by path
    assert {table.operator for table in tables.files} == {"gemm", "generation_attention"}
    assert all(table.file.startswith("h100_sxm__") for table in tables.files)
    with pytest.raises(CatalogueError, match="tables are of H100-SXM, the model runs on H200-SXM"):
        MeasuredModel(roofline_model(load_model("qwen3-8b"), load_gpu("h200")), tables)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gemm_dtype,m,n,latency\nbfloat16,1,2,3\n", "column `k` is missing"),
        ("gemm_dtype,m,n,k,latency\nbfloat16,1,2,x,3\n", "row 2: `k` must be a number above 0, got `x`"),
        (
            "gemm_dtype,m,n,k,latency\nbfloat16,1,2,3,4\nbfloat16,1,2,3,0\n",
            "row 3: `latency` must be a number above 0, got `0`",
        ),
        ("gemm_dtype,m,n,k,latency\nbfloat16,1,2\n", "row 2: expected 5 columns"),
        ("gemm_dtype,m,n,k,latency\n", "gemm.csv: a header and no rows"),
    ],
)
def test_a_table_that_cannot_be_read_is_one_error(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "gemm.csv").write_text(text)
    with pytest.raises(CatalogueError) as error:
        read_operator_tables(tmp_path, GPU)
    assert said in str(error.value)


def test_simulate_reports_what_it_was_measured_by(tmp_path: Path, base: RooflineModel) -> None:
    write_tables(tmp_path / "ops", base)
    small = ["--model", "qwen3-8b", "--gpu", "h100", "--workload", "gen:n=5,rate=5,input=fixed:64,output=fixed:8"]
    arguments = [*small, "--operators", str(tmp_path / "ops"), "--no-intervals"]
    result = CliRunner().invoke(simulate, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    about = json.loads(result.stdout)["about"]
    assert about["cost_model"]["kind"] == "measured, engine"
    assert {table["operator"] for table in about["cost_model"]["tables"]} == {"gemm", "generation_attention"}
    assert "--operators" in about["command"]
    result = CliRunner().invoke(simulate, [*small, "--operators", str(tmp_path / "nowhere")])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 2)


def test_calibrating_from_tables_finds_how_much_slower_the_card_is(tmp_path: Path, base: RooflineModel) -> None:
    write_tables(tmp_path / "ops", base, gemm=1.4, decode=1.4)
    arguments = ["operators", str(tmp_path / "ops"), "--gpu", "h100", "--model", "qwen3-8b", "--date", "2026-11-22"]
    result = CliRunner().invoke(calibrate, [*arguments, "--out", str(tmp_path / "c.json")])
    assert result.exit_code == 0, result.output
    found = Calibration.load(tmp_path / "c.json")
    assert 1.25 < found.correction.kernels < 1.4  # not exactly: norms, sampling and prefill have no table here
    assert found.correction.step_us == found.correction.row_us == 0.0
    assert [source.kind for source in found.sources] == ["operator_tables"] * 2


def test_attention_takes_rows_of_the_models_heads(tmp_path: Path) -> None:
    """A table may have a pair of dtypes for other heads only, with another kernel."""
    base = roofline_model(load_model("qwen3-8b"), GPU, kv_dtype="fp8")
    rows = ["batch_size,isl,num_heads,num_key_value_heads,head_dim,attn_dtype,kv_cache_dtype,latency"]
    for attn, head_dim, times in (("bfloat16", 512, 9.0), ("fp8", 512, 8.0), ("fp8", 128, 2.0)):
        for batch in (1, 4, 16):
            for tokens in 2 ** np.arange(6, 15):
                heads = map(np.array, (32.0, 8.0, float(head_dim)))
                us = float(base.one_layer_extend_us(np.array(float(batch)), np.array(float(tokens)), *heads))
                rows.append(f"{batch},{tokens},32,8,{head_dim},{attn},fp8,{times * us / 1e3:.9g}")
    (tmp_path / "context_attention.csv").write_text("\n".join(rows) + "\n")
    measured = MeasuredModel(base, read_operator_tables(tmp_path, GPU))
    shape = extend_shape(2048)
    before, after = base.terms_us(shape), measured.terms_us(shape)
    assert after["attention_prefill"] == pytest.approx(2.0 * before["attention_prefill"], rel=1e-6)
    assert measured.extrapolated == set()


@needs_data
@pytest.mark.parametrize("name", ["h100", "l40s"])
def test_prompts_through_linear_attention_take_what_was_published(name: str) -> None:
    """Chunk kernels of Qwen3.5's layers, and of a rank's part of them; shapes that a pass may have."""
    (path,) = DATA.glob(f"{name}*__gdn_perf.csv.gz")
    base, gpu, ratios = load_model("qwen3.5-27b"), load_gpu(name), []
    for row in list(csv.DictReader(gzip.decompress(path.read_bytes()).decode().splitlines()))[::7]:
        rows, tokens, key_heads, value_heads = (
            int(row[column]) for column in ("batch_size", "seq_len", "num_k_heads", "num_v_heads")
        )
        if row["kernel_source"] != "chunk_gated_delta_rule" or rows * tokens > 32_768:
            continue
        delta = GatedDelta(key_heads=key_heads, value_heads=value_heads, key_dim=128, value_dim=128, conv_kernel=4)
        pairs = rows * tokens * (tokens + 1) // 2
        shape = BatchShape(extend_rows=rows, extend_tokens=rows * tokens, extend_pairs=pairs)
        us = roofline_model(replace(base, delta=delta), gpu).delta_us(shape) / base.linear_layers
        ratios.append(us / (float(row["latency"]) * 1e3))
    low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9))
    assert len(ratios) > 200
    assert 0.8 < middle < 1.25
    assert 0.5 < low < high < 2.0


# --------------------------------------------------------------------------------------------------------- collectives

COLLECTIVES = {"all_gather": 1.0, "alltoall": 0.5, "reduce_scatter": 3.0, "all_reduce": 2.0}
SIZES = [2**power for power in range(8, 28)]


def write_collectives(folder: Path, *, named: bool, gpus: int = 4) -> Path:
    """NCCL rows of four operations that take multiples of the roofline's lines; sizes count elements of two bytes.

    If operations are named, their dtype is that of activations, otherwise that of the same size in NCCL's tests.
    """
    folder.mkdir(exist_ok=True)
    base = roofline_model(load_model("deepseek-v3"), GPU, Parallelism(tp=gpus, attention_dp=gpus))
    assert base.exchange is not None
    rows = ["nccl_dtype,num_gpus,message_size,latency" + ",op_name" * named]
    for name, times in COLLECTIVES.items():
        for size in SIZES:
            bytes_ = 2 * size
            gather_us = base.exchange.gather_us(bytes_ / base.all_reduce_bytes(1), gpus)
            us = times * (base.all_reduce_us(bytes_) if name == "all_reduce" else gather_us)
            dtype = "bfloat16" if named else "half"
            rows.append(f"{dtype},{gpus},{size},{us / 1e3:.9g}" + f",{name}" * named)
            rows.append(f"int8,{gpus},{size},{99 * us / 1e3:.9g}" + f",{name}" * named)
    (folder / "nccl_perf.csv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.parametrize("named", [True, False])
def test_each_collective_takes_the_rows_of_its_own_operation(tmp_path: Path, named: bool) -> None:
    """By name, or by the order in which they are measured; in bytes, where tables count elements."""
    tables = read_operator_tables(write_collectives(tmp_path / f"named-{named}", named=named), GPU)
    for split in (Parallelism(tp=4), Parallelism(tp=4, attention_dp=4), Parallelism(tp=4, attention_dp=2)):
        base = roofline_model(load_model("deepseek-v3"), GPU, split)
        measured = MeasuredModel(base, tables)
        for shape in (decode_shape(64, 100), extend_shape(2048)):
            before, after = base.terms_us(shape), measured.terms_us(shape)
            for name in set(before) & set(COLLECTIVES):
                times = COLLECTIVES[name]
                if split.attention_tp == 2:  # half of it is among two GPUs, of which there is no row
                    assert 0.999 * before[name] < after[name] < 1.001 * times * before[name]
                else:
                    assert after[name] == pytest.approx(times * before[name], rel=1e-3), (split, name)
        assert not measured.extrapolated & set(COLLECTIVES)
        assert bool(set(measured.without_table) & set(COLLECTIVES)) == (split.attention_tp == 2)


def test_rows_of_an_operation_no_table_names_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "nccl.csv").write_text("num_gpus,message_size,latency\n2,512,0.01\n2,512,0.02\n2,1024,0.02\n")
    with pytest.raises(CatalogueError) as error:
        read_operator_tables(tmp_path, GPU)
    assert "row 2: 2 rows of 512 half elements on 2 GPUs, and no column `op_name`" in str(error.value)
    assert str(error.value).endswith("hint: add `op_name`, one of all_gather, alltoall, reduce_scatter, all_reduce")
    (tmp_path / "nccl.csv").write_text("nccl_dtype,num_gpus,message_size,latency\nint3,2,512,0.01\n")
    with pytest.raises(CatalogueError, match=r"row 2: the dtype of a collective must be one of .*, got `int3`"):
        read_operator_tables(tmp_path / ".", GPU)


@needs_data
@pytest.mark.parametrize("gpu", ["h200", "l40s"])
def test_the_fourth_operation_of_the_public_tables_is_the_all_reduce(gpu: str) -> None:
    """The evidence: an engine's own all-reduce leaves large messages to NCCL, and it moves twice as much as the others.

    Not on L40S: over PCIe its two files differ by up to two fifths.
    """
    tables = read_operator_tables(DATA, load_gpu(gpu))
    own, nccl = tables.of("custom_allreduce"), tables.of("nccl")
    assert own is not None
    assert nccl is not None
    assert set(nccl.columns["operation"]) == set(COLLECTIVES)

    def rows(table: Any, operation: str, gpus: int, column: str, kept: str) -> dict[float, float]:
        c = table.columns
        mask = (c["operation"] == operation) & (c["num_gpus"] == gpus) & np.char.endswith(c[column], kept)
        return dict(zip(c["message_bytes"][mask], table.latency_us[mask], strict=True))

    for gpus in (2, 4, 8):
        mine = rows(own, "all_reduce", gpus, "backend", "graph")
        found = {name: rows(nccl, name, gpus, "nccl_dtype", "half") for name in COLLECTIVES}
        for size in (2.0**25, 2.0**27, 2.0**29):
            if gpu != "l40s":
                assert mine[size] == pytest.approx(found["all_reduce"][size], rel=0.05), (gpus, size)
            assert found["all_reduce"][size] > 1.35 * max(found[n][size] for n in ("all_gather", "reduce_scatter"))


@needs_data
def test_the_catalogue_has_the_collectives_of_the_public_tables() -> None:
    """Every line of A100, H100, H200 and L40S, to the digit."""
    found = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "collectives.py")], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout == (ROOT / "benchmarks" / "results" / "collectives.txt").read_text()


@needs_data
@pytest.mark.parametrize(("model", "tp", "dtype"), [("qwen3-32b", 4, None), ("deepseek-v3", 8, None)])
def test_public_tables_agree_with_the_roofline_made_of_their_medians(model: str, tp: int, dtype: None) -> None:
    base = roofline_model(load_model(model), GPU, tp, dtype)
    tables = read_operator_tables(DATA, GPU)
    assert {table.operator for table in tables.files} == set(OPERATORS)
    measured = MeasuredModel(base, tables)
    assert measured.without_table == []
    ratios = [
        measured.batch_us(shape).mean_us / base.batch_us(shape).mean_us
        for shape in (decode_shape(16, 1000), decode_shape(64, 2000), decode_shape(256, 1000), extend_shape(2048))
    ]
    assert 0.85 < np.median(ratios) < 1.25, ratios
    assert measured.extrapolated == set()
