"""Which of the lines that only a GPU reaches the tests on the fake CUDA device run.

    python -m tests.fake_cuda_coverage                 the table by module; exit status 1 below the floor
    python -m tests.fake_cuda_coverage --missing       with the numbers of the lines that are not run
    python -m tests.fake_cuda_coverage --lines         only count the lines that only a GPU reaches; nothing is run
    python -m tests.fake_cuda_coverage --on-cpu TEST   which of them tests on a CPU run; there should be none

A line is one that only a GPU reaches if it may run on some device, but not where no device is a GPU and Triton's
interpreter is off: `tests/support/gpu_lines`. Bodies of Triton's kernels are counted apart. They run on no CPU but in
the interpreter, and are compiled ahead of time: `make kernel-resources`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import coverage

from tests.support.gpu_lines.facts import RUNTIME, GpuLines, lines_of_a_gpu

ROOT = Path(__file__).resolve().parent.parent
FLOOR = 90.0  # per cent
MARK = "FakeCuda("  # text of a test that uses the device


def tests_on_the_fake_device() -> list[str]:
    """Return the files of tests that use it."""
    found = sorted((ROOT / "tests/runtime").glob("test_*.py"))
    return [path.relative_to(ROOT).as_posix() for path in found if MARK in path.read_text(encoding="utf-8")]


def lines_run(tests: list[str], *, interpret: bool) -> dict[str, set[int]]:
    """Run tests under coverage, the processes that they start too. Returns by file the lines that were run.

    Args:
        interpret: whether Triton's kernels run in its interpreter.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings, data = Path(folder) / "settings", Path(folder) / "data"
        settings.write_text(
            f"[run]\ndata_file = {data}\nparallel = true\npatch = subprocess\nconcurrency = thread\n"
            f"source = {RUNTIME / 'lockstep/runtime'}\n"
        )
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q", *tests]
        environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret))}
        if status := subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            raise SystemExit(f"the tests failed with status {status}: nothing is counted")
        found: dict[str, set[int]] = {}
        for part in Path(folder).glob("data.*"):
            one = coverage.CoverageData(str(part))
            one.read()
            for name in one.measured_files():
                found.setdefault(name, set()).update(one.lines(name) or ())
    return found


def executable(path: str) -> set[int]:
    """Return the lines of a file that coverage counts."""
    return set(coverage.Coverage(config_file=False, data_file=None).analysis2(path)[1])


def shown(numbers: set[int]) -> str:
    """Return numbers as text, runs of them as first-last."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_cuda_coverage")
    parser.add_argument("--missing", action="store_true", help="also the lines that are not run")
    parser.add_argument("--lines", action="store_true", help="only count, run nothing")
    parser.add_argument("--on-cpu", nargs="+", metavar="TEST", help="count what these tests run of them on the CPU")
    asked = parser.parse_args()
    only: dict[str, GpuLines] = lines_of_a_gpu()
    tests = asked.on_cpu or tests_on_the_fake_device()
    ran = {} if asked.lines else lines_run(tests, interpret=not asked.on_cpu)
    print(f"{'module':48}{'lines':>7}{'run':>7}{'share':>9}{'kernels':>9}")
    total = there = kernels = 0
    for path, found in sorted(only.items()):
        wanted = found.lines & executable(path)
        done = wanted & ran.get(path, set())
        total, there, kernels = total + len(wanted), there + len(done), kernels + len(found.kernels)
        if not wanted and not found.kernels:
            continue
        share = f"{100 * len(done) / len(wanted):7.1f} %" if wanted else ""
        name = Path(path).relative_to(RUNTIME / "lockstep/runtime")
        print(f"{name!s:48}{len(wanted):7}{len(done):7}{share:>9}{len(found.kernels):9}")
        some = done if asked.on_cpu else wanted - done
        if (asked.missing or asked.on_cpu) and some:
            print(f"    {shown(some)}")
    share = 100 * there / max(total, 1)
    print(f"{'all':48}{total:7}{there:7}{share:7.1f} %{kernels:9}")
    if asked.on_cpu:
        return 1 if there else 0
    return 0 if asked.lines or share >= FLOOR else 1


if __name__ == "__main__":
    sys.exit(main())
