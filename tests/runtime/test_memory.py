"""The size of the pool, and the errors if there is no room. Numbers are given, not measured: no GPU here."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import memory  # noqa: E402
from lockstep.runtime.memory import CPU_KV_BYTES, MIB, Use, as_asked, explained, fitted, size_pool  # noqa: E402

CPU = torch.device("cpu")
USE = Use(taken=16_500 * MIB, others=500 * MIB, weights=16_000 * MIB, activations=1_500 * MIB, graphs=1_000 * MIB)


def test_the_pool_gets_what_is_left_of_the_fraction() -> None:
    budget = fitted(USE, 100_000 * MIB, 0.9, 2 * MIB, 100, "cuda:0")
    assert budget.pages == (90_000 - 16_500 - 1_500 - 1_000) // 2 - 1
    assert budget.kv == 71_000 * MIB
    assert budget.table().splitlines() == [
        "other processes        500 MiB",
        "weights             16,000 MiB",
        "activations          1,500 MiB",
        "CUDA graphs          1,000 MiB",
        "KV pages            71,000 MiB",
        "left alone          10,000 MiB",
        "the device         100,000 MiB",
        "35,499 pages of 2,048.0 KiB",
    ]


def test_a_pool_too_small_for_one_request_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as raised:
        fitted(USE, 24_000 * MIB, 0.8, 2 * MIB, 2_048, "cuda:0")
    first, *table, hint = str(raised.value).splitlines()
    assert first == (
        "`mem_fraction` 0.8 of cuda:0 leaves 99 KV pages, but the longest request needs 2,048: 3,898 MiB are lacking"
    )
    assert len(table) == 8
    assert hint.startswith("hint: a larger mem_fraction, a shorter context_tokens_max, fewer graphs")
    assert fitted(USE, 24_000 * MIB, 0.8, 2 * MIB, 99, "cuda:0").pages == 99
    with pytest.raises(ConfigError, match="leaves 0 KV pages"):
        fitted(USE, 16_000 * MIB, 0.9, 2 * MIB, 1, "cuda:0")


def test_pages_that_were_requested_are_accounted_for() -> None:
    budget = as_asked(USE, 100_000 * MIB, 2 * MIB, 1_023, "cuda:0")
    assert budget.pages == 1_023
    assert "KV pages             2,048 MiB" in budget.table()
    assert "left alone          79,000 MiB" in as_asked(USE, 100_000 * MIB, MIB, 999 + 1_000, "cuda:0").table()
    with pytest.raises(ConfigError) as raised:
        as_asked(USE, 20_000 * MIB, 2 * MIB, 1_023, "cuda:0")
    first, *table, hint = str(raised.value).splitlines()
    assert first == "`pages` 1,023 do not fit on cuda:0: 1,048 MiB are lacking"
    assert len(table) == 8
    assert hint == "hint: 499 would; without `pages` as many are made as fit"
    assert as_asked(USE, 20_000 * MIB, 2 * MIB, 499, "cuda:0").pages == 499


def test_running_out_of_memory_is_explained() -> None:
    with pytest.raises(ConfigError) as raised, explained("the weights", CPU, "a smaller model"):
        raise torch.OutOfMemoryError("Tried to allocate 9 GiB.\nmuch more")
    first, *rest = str(raised.value).splitlines()
    assert first.startswith("there is no room for the weights: ")
    assert first.endswith(" MiB of memory are free")
    assert rest == ["Tried to allocate 9 GiB.", "hint: a smaller model"]
    for other in (ValueError("something else"), RuntimeError("CUDA error: device-side assert triggered")):
        with pytest.raises(type(other), match=str(other)), explained("the weights", CPU, "a smaller model"):
            raise other


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory\nmore"),
        MemoryError(),
    ],
)
def test_so_is_whatever_else_speaks_of_memory(error: Exception) -> None:
    with pytest.raises(ConfigError, match="there is no room for the weights"), explained("the weights", CPU, "less"):
        raise error


@pytest.mark.parametrize("shape", [(10**14,), (10**9, 10**9, 10**9)])
def test_what_torch_reports_on_a_cpu_is_known(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="there is no room for it"), explained("it", CPU, "less"):
        torch.zeros(shape)


def test_a_pool_larger_than_the_memory_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes_of", lambda device: 100 * MIB)
    sizes = {"page_bytes": MIB, "weight_bytes": 5, "device": CPU, "mem_fraction": 0.9}
    passes = {"largest_pass": lambda: None, "graphs": lambda: 0}
    with pytest.raises(ConfigError) as raised:
        size_pool(**sizes, **passes, pages_least=10, pages=100)
    first, *table, hint = str(raised.value).splitlines()
    assert first == "`pages` 100 needs 101 MiB of KV, but 100 MiB of memory are free"
    assert len(table) == 4
    assert hint == "hint: 99 would fit"
    assert size_pool(**sizes, **passes, pages_least=10, pages=99).pages == 99
    with pytest.raises(ConfigError, match="the longest request needs 1,001 MiB of KV"):
        size_pool(**sizes, **passes, pages_least=1_000)


def test_a_cpu_gets_a_fixed_amount() -> None:
    def never() -> int:
        raise AssertionError("nothing is measured on a CPU")

    budget = size_pool(
        page_bytes=1 << 20,
        weight_bytes=5,
        device=CPU,
        mem_fraction=0.9,
        largest_pass=never,
        graphs=never,
        pages_least=10,
    )
    assert budget.kv == CPU_KV_BYTES
    assert "other processes" not in budget.table()
    with pytest.raises(ConfigError, match="`mem_fraction` must be above 0 and at most 1, got"):
        size_pool(
            page_bytes=1, weight_bytes=5, device=CPU, mem_fraction=1.5, largest_pass=never, graphs=never, pages_least=1
        )
