"""Attention backends: the reference against torch's attention, the choice of a backend, and the calls of FlashInfer."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import attention, triton_trial  # noqa: E402
from lockstep.runtime.attention import Needs, choose, flashinfer_backend, make  # noqa: E402
from lockstep.runtime.attention.reference import ReferenceAttention  # noqa: E402
from lockstep.runtime.kv_pool import KvPool  # noqa: E402
from lockstep.runtime.quantized.fp8 import to_fp8  # noqa: E402
from tests.runtime import flashinfer_signatures  # noqa: E402
from tests.support.flashinfer_wrappers import RELEASES, Wrapper, fits, flashinfer_with_events  # noqa: E402
from tests.support.passes import Pass, make_pass  # noqa: E402

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def dense(made: Pass, scale: float | None = None) -> torch.Tensor:
    """torch's own attention on dense copies of each row, in fp64."""
    group = made.query.shape[1] // made.pool.kv_heads
    out = []
    for row, span in enumerate(made.spans()):
        start, length = int(made.batch.starts_host[row]), int(made.batch.lengths_host[row])
        key, value = (one[row].double().repeat_interleave(group, 1) for one in (made.dense_keys, made.dense_values))
        mask = torch.arange(length)[None, :] <= torch.arange(start, length)[:, None]
        query = made.query[span].double().transpose(0, 1)
        here = scaled_dot_product_attention(
            query, key.transpose(0, 1), value.transpose(0, 1), attn_mask=mask, scale=scale
        )
        out.append(here.transpose(0, 1))
    return torch.cat(out)


spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair))), min_size=1, max_size=4
)


@given(spans, st.data(), st.sampled_from([(1, 1), (4, 1), (6, 2), (7, 7)]), st.sampled_from([1, 3, 16, 64]))
@settings(max_examples=40)
def test_reference_equals_torch_on_dense_copies(spans, data, heads, page_size):
    extend_rows = data.draw(st.integers(0, len(spans)))
    spans = [span if row < extend_rows else (span[1] - 1, span[1]) for row, span in enumerate(spans)]
    made = make_pass(spans, extend_rows=extend_rows, heads=heads[0], kv_heads=heads[1], page_size=page_size)
    out = ReferenceAttention(made.pool).run(0, made.query, made.key, made.value, made.batch)
    torch.testing.assert_close(out.double(), dense(made), atol=2e-6, rtol=2e-6)


def test_reference_accumulates_half_precision_in_fp32():
    made = make_pass([(0, 200)], extend_rows=1, page_size=16, dtype=torch.bfloat16)
    out = ReferenceAttention(made.pool).run(0, made.query, made.key, made.value, made.batch)
    assert out.dtype == torch.bfloat16
    # Only the last rounding is left: half of the last of 8 bits.
    torch.testing.assert_close(out.double(), dense(made), atol=1e-6, rtol=1.01 * 2**-8)


def test_reference_takes_another_scale():
    made = make_pass([(0, 9), (12, 13)], extend_rows=1)
    out = ReferenceAttention(made.pool, scale=0.7).run(0, made.query, made.key, made.value, made.batch)
    torch.testing.assert_close(out.double(), dense(made, 0.7), atol=2e-6, rtol=2e-6)


def test_reference_does_not_run_in_a_graph():
    made = make_pass([(0, 1)], extend_rows=0)
    with pytest.raises(ValueError, match="cannot run in a CUDA graph\nhint: use `triton`"):
        ReferenceAttention(made.pool).plan(made.batch, graph=True)


# The choice of a backend. Installed packages and the device are simulated.


@pytest.fixture
def machine(monkeypatch):
    """A machine with a Hopper GPU and everything installed; a test removes the part that it concerns."""
    here = types.SimpleNamespace(
        installed={"flashinfer", "flashinfer_jit_cache", "triton"},
        flashinfer="0.6.18.post1",
        capability=(9, 0),
        triton_unavailable=None,
    )
    monkeypatch.setattr(attention, "find_spec", lambda name: name if name in here.installed else None)
    monkeypatch.setattr(attention, "version", lambda name: here.flashinfer)
    monkeypatch.setattr(attention, "_has_compiler", lambda: False)
    monkeypatch.setattr(attention, "_logged_choices", set())
    monkeypatch.setattr(attention, "_flashinfer_fails", lambda needs: None)
    monkeypatch.setattr(triton_trial, "unavailable_because", lambda device: here.triton_unavailable)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: here.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU of 2017")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return here


def test_auto_takes_the_fastest_that_can_run(machine):
    assert choose("auto", Needs(CUDA, torch.bfloat16, 128, 16)).name == "flashinfer"
    choice = choose("auto", Needs(CUDA, torch.float32, 128, 16))
    assert choice.name == "triton"
    assert choice.reason == "flashinfer cannot: it has kernels for bfloat16 and float16, not for float32"
    assert choose("auto", Needs(CUDA, torch.bfloat16, 80, 16, graphs=True)).name == "triton"
    choice = choose("auto", Needs(CPU, torch.float32, 64, 16))
    assert choice.name == "cpu"
    assert "triton cannot: it needs a CUDA device, this is `cpu`" in choice.reason
    assert choose("auto", Needs(CUDA, torch.bfloat16, 512, 16)).name == "reference"


def test_auto_does_not_take_the_interpreter(machine, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    choice = choose("auto", Needs(CPU, torch.float32, 64, 16))
    assert choice.name == "cpu"
    assert "triton cannot: it would run in Triton's interpreter" in choice.reason
    assert choose("triton", Needs(CPU, torch.float32, 64, 16)).name == "triton"


def test_auto_with_invariant_numerics_takes_triton(machine):
    assert choose("auto", Needs(CUDA, torch.bfloat16, 128, 16, numerics="invariant")).name == "triton"
    assert choose("flashinfer", Needs(CUDA, torch.bfloat16, 128, 16, numerics="invariant")).name == "flashinfer"
    machine.installed.discard("triton")
    assert choose("auto", Needs(CUDA, torch.bfloat16, 128, 16, numerics="invariant")).name == "flashinfer"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"installed": {"triton"}}, r'flashinfer is not installed; pip install "lockstep-runtime\[cuda\]"'),
        ({"flashinfer": "0.8.0"}, "it is written for flashinfer-python 0.6.18, 0.7, found 0.8.0"),
        ({"capability": (7, 5)}, "it needs compute capability 8.0, a GPU of 2017 has 7.5"),
        ({"installed": {"flashinfer", "triton"}}, "it compiles its kernels with nvcc, which is not on PATH"),
    ],
)
def test_a_forced_backend_that_cannot_run_reports_why_and_what_can(machine, change, why):
    vars(machine).update(change)
    with pytest.raises(ConfigError, match=f"`attention_backend` flashinfer cannot run here: {why}") as failed:
        choose("flashinfer", Needs(CUDA, torch.bfloat16, 128, 16))
    others = "`reference`" if "capability" in change else "`triton`, `reference`"
    assert str(failed.value).endswith(f"hint: these can: {others}")


def test_triton_that_does_not_work_is_passed_over_and_named_where_it_is_forced(machine):
    machine.installed.discard("flashinfer")
    machine.triton_unavailable = "a small kernel could not be run: RuntimeError: Failed to find C compiler."
    choice = choose("auto", Needs(CUDA, torch.bfloat16, 128, 16))
    assert choice.name == "reference"
    assert choice.reason.endswith(f"; triton cannot: {machine.triton_unavailable}")
    with pytest.raises(ConfigError, match=r"triton cannot run here: a small kernel could not be run: .* C compiler\."):
        choose("triton", Needs(CUDA, torch.bfloat16, 128, 16))


def test_nonsense_is_named(machine):
    with pytest.raises(ConfigError, match="must be one of auto, flashinfer, triton, cpu, reference, got `flash`"):
        choose("flash", Needs(CPU, torch.float32, 64, 16))
    with pytest.raises(ConfigError, match="`numerics` must be `fast` or `invariant`, got `exact`"):
        choose("auto", Needs(CPU, torch.float32, 64, 16, numerics="exact"))
    with pytest.raises(
        ConfigError, match=r"auto found none that can run here: .*triton: it has kernels for head dims up to"
    ):
        choose("auto", Needs(CUDA, torch.bfloat16, 512, 16, graphs=True))
    with pytest.raises(ConfigError, match="reference cannot run here: it cannot run in CUDA graphs"):
        choose("reference", Needs(CUDA, torch.bfloat16, 128, 16, graphs=True))
    with pytest.raises(ConfigError, match="must be one of flashinfer, triton, cpu, reference, got `auto`"):
        make("auto", make_pass([(0, 1)], extend_rows=0).pool, 4)


def test_the_reason_is_logged_once(machine, caplog):
    with caplog.at_level(logging.INFO, "lockstep.runtime"):
        for _ in range(3):
            choose("auto", Needs(CPU, torch.float32, 64, 16))
        choose("reference", Needs(CPU, torch.float32, 64, 16))
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith("attention backend cpu: flashinfer cannot: it needs a CUDA device")
    assert caplog.messages[1] == "attention backend reference: requested"


def test_choosing_imports_neither_triton_nor_flashinfer():
    code = (
        "import sys, torch; from lockstep.runtime.attention import Needs, choose;"
        "choose('auto', Needs(torch.device('cpu'), torch.float32, 64, 16));"
        "print(sorted({'triton', 'flashinfer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout


# FlashInfer has no kernels for a CPU: its calls are those of `tests.support.flashinfer_wrappers`.


@pytest.fixture
def flashinfer(monkeypatch):
    """A module of that name with the wrappers above."""
    return flashinfer_with_events(monkeypatch)


def test_flashinfer_receives_the_scales_of_kv_in_fp8(flashinfer):
    made, twin = (make_pass([(3, 9), (37, 38)], extend_rows=1, page_size=16) for _ in range(2))
    for one in (made, twin):
        old = one.pool
        one.pool = KvPool(1, old.pages, 16, 2, 16, torch.float32, CPU, [(0.5, 0.125)])
        one.pool.keys[0], one.pool.values[0] = to_fp8(old.keys[0] / 0.5), to_fp8(old.values[0] / 0.125)
    expected = ReferenceAttention(twin.pool).run(0, twin.query, twin.key, twin.value, twin.batch)
    backend = make("flashinfer", made.pool, 4)
    backend.plan(made.batch)
    torch.testing.assert_close(backend.run(0, made.query, made.key, made.value, made.batch), expected)
    assert backend.decode.options["kv_data_type"] == torch.float8_e4m3fn


def test_kv_in_fp8_is_tried_and_has_a_gpu_that_can(trial, machine, flashinfer, monkeypatch):
    trial()
    assert choose("auto", Needs(CUDA, torch.bfloat16, 128, 16, kv_fp8=True)).name == "flashinfer"
    assert choose("triton", Needs(CUDA, torch.bfloat16, 128, 16, kv_fp8=True)).name == "triton"
    right = Wrapper.run
    monkeypatch.setattr(Wrapper, "run", lambda self, query, paged, *, out, **_: right(self, query, paged, out=out))
    choice = choose("auto", Needs(CUDA, torch.bfloat16, 128, 16, kv_fp8=True))  # a wrapper that ignores the scales
    assert (choice.name, "KV in fp8 gives wrong results" in choice.reason) == ("triton", True)
    machine.capability = (8, 0)
    choice = choose("auto", Needs(CUDA, torch.bfloat16, 128, 16, kv_fp8=True))
    assert choice.name == "reference"
    assert "triton cannot: KV in fp8 needs compute capability 8.9" in choice.reason


@pytest.mark.parametrize(("extend_rows", "page_size"), [(0, 16), (2, 1), (2, 16), (4, 64)])
def test_flashinfer_receives_the_pages_of_each_row(flashinfer, extend_rows, page_size):
    spans = [(0, 5), (16, 32), (63, 64), (0, 1)]
    spans = [span if row < extend_rows else (span[1] - 1, span[1]) for row, span in enumerate(spans)]
    made, twin = (make_pass(spans, extend_rows=extend_rows, page_size=page_size) for _ in range(2))
    expected = ReferenceAttention(twin.pool).run(0, twin.query, twin.key, twin.value, twin.batch)
    backend = make("flashinfer", made.pool, 4)
    backend.plan(made.batch)
    out = backend.run(0, made.query, made.key, made.value, made.batch)
    torch.testing.assert_close(out, expected)
    if extend_rows:
        assert backend.extending.options["causal"] is True
    if extend_rows < 4:
        assert backend.decode.options["q_data_type"] == torch.float32
        assert "causal" not in backend.decode.options


def test_flashinfer_in_graphs_has_a_wrapper_for_each_number_of_rows(flashinfer):
    wrappers = set()
    backend = make("flashinfer", make_pass([(3, 4)], extend_rows=0, page_size=16).pool, 4)
    for spans in ([(3, 4)], [(8, 9)], [(3, 4), (40, 41)]):
        made, twin = (make_pass(spans, extend_rows=0, page_size=16) for _ in range(2))
        backend.pool = made.pool
        backend.plan(made.batch, graph=True)
        assert backend.active.calls["use_cuda_graph"] is True
        out = backend.run(0, made.query, made.key, made.value, made.batch)
        torch.testing.assert_close(
            out, ReferenceAttention(twin.pool).run(0, twin.query, twin.key, twin.value, twin.batch)
        )
        wrappers.add(backend.active)
    assert len(wrappers) == 2
    made = make_pass([(0, 4)], extend_rows=1)
    with pytest.raises(ValueError, match="a CUDA graph holds decodes only, got 1 rows that extend"):
        backend.plan(made.batch, graph=True)


def test_flashinfer_plans_never_share_a_pinned_buffer_that_may_still_be_read(flashinfer):
    made = make_pass([(0, 4), (3, 4)], extend_rows=1)
    ahead = 6
    backend = make("flashinfer", made.pool, 4, plans_in_flight=ahead)
    for _ in range(ahead // 2):
        backend.plan(made.batch)
    used = backend.extending.pinned_used + backend.decode.pinned_used
    assert len(set(used)) == len(used) == ahead
    assert flashinfer.Event.waited == 0
    backend.plan(made.batch)
    assert flashinfer.Event.waited == 2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "mib"),
    [
        (32, 8, 256, 81),  # 32 heads x (64 + 255) pieces x 16 x 129 x 4 bytes
        (64, 8, 512, 387),  # 64 heads x (256 + 511) pieces x 16 x 129 x 4 bytes
        (64, 8, 340, 257),
        (64, 8, 0, 134),
        (64, 4, 0, 267),  # 66 pieces of 128 rows fill 132 SMs twice over
        (16, 1, 2, 267),  # a trial with 16 heads per KV head
    ],
)
def test_flashinfer_gets_the_workspace_that_its_plans_require(heads, kv_heads, rows, mib):
    assert flashinfer_backend.workspace_needed(heads, kv_heads, 128, rows, 132) == mib << 20


def test_flashinfer_has_at_least_the_workspace_that_it_recommends(flashinfer):
    backend = make("flashinfer", make_pass([(3, 4)], extend_rows=0, page_size=16).pool, 4)
    assert backend.workspace.numel() == 256 << 20


@pytest.mark.parametrize(
    ("numerics", "heads", "options", "tensor_cores"),
    [
        ("fast", 4, {}, False),
        ("fast", 8, {}, True),
        ("invariant", 2, {"disable_split_kv": True}, True),
    ],
)
def test_flashinfer_numerics(flashinfer, numerics, heads, options, tensor_cores):
    made = make_pass([(0, 4), (3, 4)], extend_rows=1, page_size=16, heads=heads)
    backend = make("flashinfer", made.pool, heads, numerics=numerics)
    backend.plan(made.batch)
    for wrapper in (backend.extending, backend.decode):
        found = {name: wrapper.options[name] for name in wrapper.options if "split" in name}
        assert found == options
    assert backend.decode.calls["use_tensor_cores"] is tensor_cores
    assert backend.decode.calls["backend"] == "fa2"
    assert backend.prefill.calls["backend"] == ("fa2" if numerics == "invariant" else "auto")


@pytest.fixture
def trial(monkeypatch):
    """The real trial of a kernel, on a CPU, with a simulated machine: request it after `machine`."""
    real = attention._flashinfer_fails
    return lambda: monkeypatch.setattr(attention, "_flashinfer_fails", lambda needs: real(replace(needs, device=CPU)))


def test_auto_passes_over_a_flashinfer_without_the_kernels(trial, machine, flashinfer, monkeypatch, caplog):
    """The packages are installed, with kernels that were compiled for another dtype."""
    trial()

    class MissingJITCacheError(RuntimeError):
        pass

    right = Wrapper.plan

    def plan(self: Any, *args: Any, **options: Any) -> None:
        if options["q_data_type"] == torch.float16:
            raise MissingJITCacheError("no module for float16\nhere is a long text")
        right(self, *args, **options)

    monkeypatch.setattr(Wrapper, "plan", plan)
    for graphs, page_size in ((False, 16), (True, 16), (True, 1)):
        assert choose("auto", Needs(CUDA, torch.bfloat16, 128, page_size, graphs=graphs, group=4)).name == "flashinfer"
    why = "a trial with float16, head dim 128, 4 heads per KV head failed: MissingJITCacheError: no module for float16"
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="lockstep.runtime"):
        choice = choose("auto", Needs(CUDA, torch.float16, 128, 16, group=4))
    assert (choice.name, choice.reason) == ("triton", f"flashinfer cannot: {why}")
    assert caplog.messages == [f"attention backend triton: flashinfer cannot: {why}"]
    with pytest.raises(ConfigError) as refused:
        choose("flashinfer", Needs(CUDA, torch.float16, 128, 16, group=4))
    assert str(refused.value) == (
        f"`attention_backend` flashinfer cannot run here: {why}\nhint: these can: `triton`, `reference`"
    )


def test_a_flashinfer_that_cannot_be_imported_is_passed_over(trial, machine, monkeypatch):
    """As without the package apache-tvm-ffi."""
    trial()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    choice = choose("auto", Needs(CUDA, torch.bfloat16, 128, 16))
    assert choice.name == "triton"
    assert "failed: ModuleNotFoundError: import of flashinfer halted" in choice.reason


def test_a_flashinfer_that_computes_nonsense_is_passed_over(trial, machine, flashinfer, monkeypatch):
    trial()
    monkeypatch.setattr(Wrapper, "run", lambda self, query, paged, *, out: out.fill_(0.5))
    choice = choose("auto", Needs(CUDA, torch.bfloat16, 128, 16))
    assert choice.name == "triton"
    assert (
        choice.reason
        == "flashinfer cannot: a trial with bfloat16, head dim 128, 1 heads per KV head gives wrong results"
    )


def test_what_is_not_requested_is_not_tried(machine, monkeypatch):
    monkeypatch.setattr(attention, "_flashinfer_fails", lambda needs: pytest.fail("it may compile for minutes"))
    assert choose("triton", Needs(CUDA, torch.bfloat16, 128, 16)).name == "triton"
    assert choose("auto", Needs(CUDA, torch.bfloat16, 128, 16, numerics="invariant")).name == "triton"


def test_every_call_of_flashinfer_is_one_that_its_releases_accept(trial, machine, flashinfer):
    """All wrappers bind each of their calls: here those of every mode."""
    assert [release.rpartition(".")[0] for release in RELEASES] == ["0.6.18", "0.7.2"]
    Wrapper.bound.clear()
    trial()
    assert choose("flashinfer", Needs(CUDA, torch.bfloat16, 128, 16, graphs=True, kv_fp8=True)).name == "flashinfer"
    assert len(Wrapper.bound) == 6
    wrapper = make("flashinfer", make_pass([(3, 4)], extend_rows=0).pool, 4).decode
    with pytest.raises(TypeError, match="fixed_split"):
        fits(wrapper, "plan", *[None] * 7, fixed_split=1)


def test_an_installed_flashinfer_is_one_whose_signatures_are_stored():
    try:
        folder = Path(str(distribution("flashinfer-python").locate_file("")))
    except PackageNotFoundError:
        pytest.skip("flashinfer is not installed")
    release, classes = flashinfer_signatures.read(folder)
    assert classes == RELEASES[release]


def test_flashinfer_splits_short_extends_only(flashinfer):
    """FA3 does not divide the positions of a row: a draft of a long row would leave most of a GPU idle."""
    used = []
    for numerics in ("fast", "invariant"):
        for new in (4, 90):
            made = make_pass([(0, 3 + new), (5, 5 + new)], extend_rows=2, page_size=16)
            backend = make("flashinfer", made.pool, 4, numerics=numerics)
            backend.plan(made.batch)
            used.append(backend.extending.calls["backend"])
            assert backend.extending.options["seq_lens"].tolist() == [3 + new, 5 + new]
            assert backend.decode.calls["backend"] == "fa2"
    assert used == ["fa2", "auto", "fa2", "fa2"]


def chosen_on_a_gpu(name: str, numerics: str) -> None:
    """Skips where the backend cannot run."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        choose(name, Needs(CUDA, torch.bfloat16, 128, 16, numerics=numerics, graphs=True))
    except ConfigError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_backends_equal_the_reference_on_a_gpu(name, numerics):
    chosen_on_a_gpu(name, numerics)
    rng = np.random.default_rng(5)
    starts, new = rng.integers(0, 3000, 12).tolist(), [*rng.integers(1, 400, 5).tolist(), *[1] * 7]
    spans = [(start, start + count) for start, count in zip(starts, new, strict=True)]
    options = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": torch.bfloat16, "device": "cuda"}
    made, twin = (make_pass(spans, extend_rows=5, **options) for _ in range(2))
    expected = ReferenceAttention(twin.pool).run(0, twin.query, twin.key, twin.value, twin.batch)
    backend = make(name, made.pool, 32, numerics=numerics)
    backend.plan(made.batch)
    out = backend.run(0, made.query, made.key, made.value, made.batch)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_decodes_replay_in_a_graph_with_other_lengths(name, numerics):
    chosen_on_a_gpu(name, numerics)
    options = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": torch.bfloat16, "device": "cuda"}
    made, twin = (make_pass([(2999, 3000), (40, 41), (700, 701)], extend_rows=0, **options) for _ in range(2))
    backend = make(name, made.pool, 32, numerics=numerics)
    backend.plan(made.batch, graph=True)
    backend.run(0, made.query, made.key, made.value, made.batch)  # compiles missing kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.run(0, made.query, made.key, made.value, made.batch)
    for lengths in ([3000, 41, 701], [5, 33, 640], [1600, 1, 16]):
        for one in (made, twin):
            host = np.array(lengths, np.int32)
            one.batch.lengths_host, one.batch.starts_host = host, host - 1
            one.batch.lengths.copy_(torch.from_numpy(host))
            last = torch.from_numpy(host - 1).cuda().long()
            pages = one.batch.page_table[one.batch.rows.long(), last // 16]
            one.batch.slots.copy_(pages.long() * 16 + last % 16)
        backend.plan(made.batch, graph=True)
        graph.replay()
        expected = ReferenceAttention(twin.pool).run(0, twin.query, twin.key, twin.value, twin.batch)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        if numerics == "invariant":  # a graph changes nothing
            backend.plan(made.batch)
            assert torch.equal(out, backend.run(0, made.query, made.key, made.value, made.batch))
