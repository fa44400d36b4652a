"""A device that never answers: no request waits without end."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.host.errors import EngineStopped  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime import llm as llm_module  # noqa: E402
from lockstep.runtime import watchdog as watchdog_module  # noqa: E402
from lockstep.runtime.watchdog import Watchdog  # noqa: E402
from tests.support.small_runtime import SmallRuntime  # noqa: E402


class Hangs:
    """Results of a kernel that does not end before it is released."""

    def __init__(self, download: Any, let_go: threading.Event, waited_for: threading.Event) -> None:
        self._download, self._let_go, self._waited_for = download, let_go, waited_for

    def ready(self) -> bool:
        return False

    def wait(self) -> Any:
        self._waited_for.set()
        self._let_go.wait()
        return self._download.wait()

    def times_us(self) -> tuple[int, int]:
        return self._download.times_us()  # type: ignore[no-any-return]


def hang(executor: Any, let_go: threading.Event, *, after: int) -> threading.Event:
    """Let the results of the lane never arrive, after this number of batches.

    Returns an event that is set when a missing result is waited for.
    """
    download, done, waited_for = executor.lane.download, [], threading.Event()

    def slow(*given: Any) -> Any:
        done.append(1)
        made = download(*given)
        return made if len(done) <= after else Hangs(made, let_go, waited_for)

    executor.lane.download = slow
    return waited_for


def test_a_batch_that_never_comes_back_ends_the_engine() -> None:
    runtime, let_go = SmallRuntime(check=False, overlap_depth=2), threading.Event()
    hangs = hang(runtime.executor, let_go, after=3)
    answer = runtime.submit([1, 2, 3], 20)
    thread = threading.Thread(target=runtime.host.run)
    thread.start()
    assert hangs.wait(120)  # the batches before it may take as long as they need
    watchdog = Watchdog(runtime.host.oldest_batch, runtime.host.fail, 0.3)
    assert answer.over.wait(120)
    assert answer.reason == "the engine failed: batch 3 did not come back in 0.3 s; a kernel may never end"
    assert watchdog.fired
    with pytest.raises(EngineStopped, match="batch 3"):
        runtime.submit([1], 1)
    let_go.set()
    thread.join(120)
    assert not thread.is_alive()
    watchdog.close()


def test_batches_that_come_back_in_time_may_go_on_for_longer_than_one_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An idle engine has no batch that could be late."""
    looks = itertools.count()
    monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(monotonic=lambda: 0.01 * next(looks)))
    batches = iter([0] * 40 + [1] * 40 + [None] * 60 + [2] * 40)
    reports: list[str] = []
    ends = threading.Event()

    def oldest() -> int | None:
        if (batch := next(batches, "over")) == "over":
            ends.set()
            return None
        return batch  # type: ignore[return-value]

    watchdog = Watchdog(oldest, reports.append, 1.0)
    watchdog._look_s = 0.005  # and by the clock above 10 ms: 40 checks, which are 0.4 s, for each batch
    assert ends.wait(120)
    watchdog.close()
    assert not reports


def test_an_llm_whose_device_hangs_reports_it_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module, "GRACE_S", 0.2)
    left: list[str] = []
    monkeypatch.setattr(llm_module, "end_hard_at_exit", left.append)
    let_go = threading.Event()
    llm = LLM(batch_timeout_s=0.5, pages=64)
    hangs = hang(llm.host.executor, let_go, after=2)
    llm._watchdog._oldest = lambda: llm.host.oldest_batch() if hangs.is_set() else None  # earlier ones have time
    with pytest.raises(EngineStopped, match=r"batch 2 did not come back in 0\.5 s"):
        llm.generate([[5, 6, 7]], Params(max_new_tokens=9, ignore_eos=True))
    llm.close()
    assert left == ["a thread of the engine"]
    let_go.set()
    llm._thread.join(120)
    assert not llm._thread.is_alive()


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match=f"`batch_timeout_s` must be 0 \\(never\\) or more, got `{wrong}`"):
        LLM(batch_timeout_s=wrong)


def test_zero_never_ends_an_engine() -> None:
    runtime = SmallRuntime()
    before = set(threading.enumerate())  # some of which may end meanwhile
    watchdog = Watchdog(runtime.host.oldest_batch, runtime.host.fail, 0)
    assert set(threading.enumerate()) <= before
    watchdog.close()
