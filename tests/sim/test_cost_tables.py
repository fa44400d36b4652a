"""Operator tables: rows come back as they are, what lies between them in proportion, and what lies beyond is said."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.sim.calibrate_cli import calibrate
from lockstep.sim.catalogue import CatalogueError, load_gpu, load_model
from lockstep.sim.cli import simulate
from lockstep.sim.cost import Calibration, RooflineModel, decode_shape, extend_shape, roofline
from lockstep.sim.cost.tables import OPERATORS, Grid, MeasuredModel, Ratios, read_operator_tables

DATA = Path(os.environ.get("LOCKSTEP_DATA", "/nowhere")) / "published" / "aic_ops"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="LOCKSTEP_DATA names no folder with published/aic_ops")
GPU = load_gpu("h100")


def write_tables(
    folder: Path, base: RooflineModel, *, gemm: float = 2.0, decode: float = 3.0, prefix: str = ""
) -> Path:
    """Tables of a card on which everything takes a multiple of the roofline."""
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
    return roofline(load_model("qwen3-8b"), GPU)


def test_every_operator_takes_what_its_table_says(tmp_path: Path, base: RooflineModel) -> None:
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


def test_what_lies_beyond_the_tables_is_said(tmp_path: Path, base: RooflineModel) -> None:
    measured = MeasuredModel(base, read_operator_tables(write_tables(tmp_path, base), GPU))
    measured.batch_us(decode_shape(8, 60_000))
    assert measured.extrapolated == {"attention_decode"}
    measured.forget()
    measured.batch_us(extend_shape(40_000))
    assert measured.extrapolated == {"qkv", "o", "gate_up", "down"}
    measured.forget()
    measured.batch_us(decode_shape(8, 6000))
    assert measured.extrapolated == set()


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
    tables = read_operator_tables(tmp_path / ".", GPU)  # another path, since folders are remembered
    assert {table.operator for table in tables.files} == {"gemm", "generation_attention"}
    assert all(table.file.startswith("h100_sxm__") for table in tables.files)
    with pytest.raises(CatalogueError, match="tables are of H100-SXM, the model runs on H200-SXM"):
        MeasuredModel(roofline(load_model("qwen3-8b"), load_gpu("h200")), tables)


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


def test_simulate_says_what_it_was_measured_by(tmp_path: Path, base: RooflineModel) -> None:
    write_tables(tmp_path / "ops", base)
    small = ["--model", "qwen3-8b", "--gpu", "h100", "--workload", "gen:n=5,rate=5,input=fixed:64,output=fixed:8"]
    arguments = [*small, "--operators", str(tmp_path / "ops"), "--no-intervals"]
    result = CliRunner().invoke(simulate, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    about = json.loads(result.stdout)["about"]
    assert about["cost_model"]["kind"] == "measured"
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
    assert 1.25 < found.correction.kernels < 1.4  # not quite: norms, sampling and prefill have no table here
    assert found.correction.step_us == found.correction.row_us == 0.0
    assert [source.kind for source in found.sources] == ["operator_tables"] * 2


@needs_data
@pytest.mark.parametrize(("model", "tp", "dtype"), [("qwen3-32b", 4, None), ("deepseek-v3", 8, None)])
def test_public_tables_agree_with_the_roofline_made_of_their_medians(model: str, tp: int, dtype: None) -> None:
    base = roofline(load_model(model), GPU, tp, dtype)
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
