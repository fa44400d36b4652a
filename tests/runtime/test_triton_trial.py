"""Whether Triton works is tried once for all modules with kernels of it; and the GPU is determined once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import triton_trial  # noqa: E402
from lockstep.runtime.assembly import choose_device  # noqa: E402
from lockstep.runtime.models import elementwise  # noqa: E402
from lockstep.runtime.sampling import sampler  # noqa: E402

CUDA = torch.device("cuda", 3)
ON_GPU: Any = SimpleNamespace(device=CUDA, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(triton_trial, "find_spec", lambda name: name)  # reported as installed in any case
    triton_trial._tried.cache_clear()
    yield
    triton_trial._tried.cache_clear()


def no_compiler(device: Any) -> bool:
    raise RuntimeError("Failed to find C compiler. Please specify via CC\nmore")


@pytest.mark.parametrize(
    ("trial", "why"),
    [
        (
            no_compiler,
            "a small kernel could not be run: RuntimeError: Failed to find C compiler. Please specify via CC",
        ),
        (lambda device: False, "a small kernel gave wrong results"),
    ],
)
def test_without_a_working_triton_torch_does_everything(
    trial: Callable[[Any], bool], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_trial, "try_out", trial)
    for _ in range(2):
        assert triton_trial.unavailable_because(CUDA) == why
        assert not elementwise.has_kernels(ON_GPU)
        assert sampler._choose("auto", CUDA)[0] == "torch"
    with pytest.raises(ConfigError) as raised:
        sampler._choose("triton", CUDA)
    assert str(raised.value) == f"`backend` triton cannot run here: {why}\nhint: use torch"
    (said,) = caplog.messages
    assert said == f"Triton cannot be used on cuda:3, and plain torch does what its kernels would: {why}"


def test_a_device_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(triton_trial, "try_out", lambda device: tried.append(device) or True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for device in (CUDA, torch.device("cuda"), CUDA):
        assert triton_trial.unavailable_because(device) is None
    assert elementwise.has_kernels(ON_GPU)
    assert tried == [CUDA]
    monkeypatch.setattr(triton_trial, "find_spec", lambda name: None)
    assert triton_trial.unavailable_because(torch.device("cuda", 0)) == "triton is not installed; pip install triton"


def test_the_trial_itself() -> None:
    """Under the interpreter where there is no GPU, which must be asked for before Triton is imported."""
    pytest.importorskip("triton", reason="triton is not installed")
    code = "import torch; from lockstep.runtime.triton_trial import try_out; print(try_out(torch.device(%r)))"
    here, interpret = ("cuda", "0") if torch.cuda.is_available() else ("cpu", "1")
    command = [sys.executable, "-c", f"import os; os.environ['TRITON_INTERPRET'] = '{interpret}'; {code % here}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)


def test_a_device_has_a_number(four_gpus: None) -> None:
    """So that nothing depends on the current device later."""
    assert [choose_device(name) for name in ("auto", "cuda", "cuda:0", "cuda:3")] == [
        torch.device("cuda", number) for number in (2, 2, 0, 3)
    ]
    assert choose_device("cpu") == choose_device("cpu:0") == torch.device("cpu")
    with pytest.raises(ConfigError, match="`device` is cuda:9, but torch sees 4 GPUs, from cuda:0 on\nhint: "):
        choose_device("cuda:9")
    for name in ("gpu", "cuda:x", "mps", None):
        with pytest.raises(ConfigError, match="`device` "):
            choose_device(name)  # type: ignore[arg-type]  # None is none


def test_without_a_gpu_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="cannot use here\nhint: --device cpu"):
        choose_device("cuda:0")
