"""Run the sections one after another, each in a process of its own, and gather what they find."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.needs import FOR_MORE, ON_A_GPU, PACKAGES, lacking, refusal

ROOT = Path(__file__).resolve().parent.parent.parent
BUDGET_S = 530.0
SECTIONS = {  # in order of value, with the most seconds each may take
    "machine": 50.0,
    "kernels": 130.0,
    "engine": 130.0,
    "decode": 90.0,
    "bubbles": 70.0,
    "pieces": 30.0,
    "quantized": 40.0,
    "tables": 50.0,
    "start": 50.0,
    "ranks": 40.0,
    "tiers": 40.0,
    "transfers": 40.0,
    "families": 70.0,
    "peer": 50.0,
    "tuning": 500.0,
}
UNCHECKED = 3  # exit status if nothing failed, but something was not checked
IF_ASKED = ("tuning",)  # run only where --only names it
LEAST_S = 15.0  # a section is not begun with less
DYING_S = 4.0  # before its limit a section that hangs must report where it stands, and end


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu for a try")
    parser.add_argument("--small", action="store_true", help="sizes at which no figure means anything")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="for everything")
    usual = ",".join(name for name in SECTIONS if name not in IF_ASKED)
    parser.add_argument(
        "--only", default=usual, metavar="NAMES", help=f"sections, with commas between; usually {usual}"
    )
    parser.add_argument("--strict", action="store_true", help=f"exit status {UNCHECKED} if anything was skipped")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # in the process of one section
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        return run_section(arguments.section, arguments)
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        print(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    if missing := lacking([*PACKAGES, *(ON_A_GPU if arguments.device.startswith("cuda") else ())]):
        print(refusal(missing), file=sys.stderr)
        return 2
    if (absence := no_gpu(arguments.device)) is not None:
        print(absence, file=sys.stderr)
        return UNCHECKED
    for what, packages in FOR_MORE.items():
        if absent := [one for one in packages if find_spec(one) is None]:
            print(f"without {', '.join(absent)}: {what} will be skipped", flush=True)
    return run_all(names, arguments)


def no_gpu(device: str) -> str | None:
    """Return why a CUDA device cannot be checked here, or None."""
    if not device.startswith("cuda"):
        return None
    import torch

    if torch.cuda.is_available():
        return None
    return (
        f"`--device` is {device}, but torch {torch.__version__} finds no CUDA device: nothing was checked\n"
        "hint: `nvidia-smi` shows the GPU and its driver; torch must be a build for CUDA; --device cpu --small is a try"
    )


def run_all(names: list[str], arguments: argparse.Namespace) -> int:
    """Every section, the report rewritten behind each.

    Returns 1 if a check failed or a section did not end, and otherwise, with --strict, UNCHECKED if any was skipped.
    """
    from benchmarks.gpu_check.report import markdown
    from benchmarks.gpu_check.section import write_json

    began = time.monotonic()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "format": 1,
        "commit": commit(),
        "device": arguments.device,
        "small": arguments.small,
        "budget_s": arguments.budget,
        "sections": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(names):
            left_s = arguments.budget - (time.monotonic() - began)
            part = Path(scratch) / f"{name}.json"
            if left_s < LEAST_S:
                found: dict[str, Any] = {"skipped": {name: f"no time: {left_s:.0f} s of the budget were left"}}
            else:
                found = in_process(name, share_s(name, names[number + 1 :], left_s), part, arguments)
            report["sections"][name] = found
            report["seconds"] = round(time.monotonic() - began, 1)
            write_json(out / "gpu_check.json", report)
            (out / "gpu_check.md").write_text(markdown(report), encoding="utf-8")
            print(f"{name:10} {verdict(found)}", flush=True)
    print(f"wrote {out / 'gpu_check.md'} and gpu_check.json, {report['seconds']} s", flush=True)
    return status_of(report["sections"].values(), strict=arguments.strict)


def status_of(sections: Iterable[dict[str, Any]], *, strict: bool) -> int:
    """Return the exit status of sections."""
    found = list(sections)
    if any(verdict(one).startswith("FAILED") for one in found):
        return 1
    skipped = sum(len(one.get("skipped", ())) for one in found)
    if strict and skipped:
        print(f"--strict: {skipped} checks were skipped, see the report", file=sys.stderr)
        return UNCHECKED
    return 0


def share_s(name: str, later: Sequence[str], left_s: float) -> float:
    """What a section may take of the seconds that are left: its most, while those behind it can have half of theirs.

    Where not even that is left, all get the same part of their most. What one leaves goes to those behind it.
    """
    most = SECTIONS[name]
    others = sum(SECTIONS[one] for one in later)
    return min(most, max(left_s - others / 2, left_s * most / (most + others)))


def in_process(name: str, limit_s: float, part: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one section, end it at its limit, and return what it wrote, whatever became of it."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--section", name, "--limit", str(limit_s)]
    command += ["--out", str(arguments.out), "--device", arguments.device, *(["--small"] if arguments.small else [])]
    log = part.with_suffix(".log")
    with log.open("wb") as file:
        child = subprocess.Popen(
            [*command, "--only", str(part)], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = child.wait(limit_s)
            ended = "" if status == 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit_s:.0f} s"
        finally:
            stop_group(child)
    try:
        found: dict[str, Any] = json.loads(part.read_text())
    except (OSError, ValueError):
        found = {}
    if ended:
        tail = log.read_text(errors="replace")[-4000:]
        found["ended"] = f"{ended}, while at: {found.get('doing', 'the start')}"
        found["log"] = tail
    return found


def stop_group(child: subprocess.Popen[bytes]) -> None:
    """End a section with all that it started."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def run_section(name: str, arguments: argparse.Namespace) -> int:
    """The body of a section's process."""
    limit_s = arguments.limit - DYING_S
    faulthandler.dump_traceback_later(max(limit_s, 1.0), exit=True)
    if (
        find_spec("flashinfer_jit_cache") is not None
    ):  # what was not compiled ahead is skipped, not compiled for minutes
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
    import torch

    from benchmarks.gpu_check.section import Section

    device = torch.device(arguments.device)
    section = Section(name, device, arguments.small, arguments.out, Path(arguments.only), limit_s - 3.0)
    section.save()
    if device.type == "cuda" and not torch.cuda.is_available():
        section.skip(name, f"torch {torch.__version__} sees no CUDA device")
        return 0
    if device.type == "cuda":
        torch.cuda.set_device(device)
    module = importlib.import_module(f"benchmarks.gpu_check.{name}")
    with section.trying(name):
        module.run(section)
    section.current = "the end"
    section.save()
    return 0


def verdict(found: dict[str, Any]) -> str:
    """One line about a section."""
    checks = found.get("checks", [])
    failed = [one["name"] for one in checks if not one["ok"]] + list(found.get("failures", {}))
    skipped = len(found.get("skipped", {}))
    tail = f", {skipped} skipped" if skipped else ""
    if failed or "ended" in found:
        what = ", ".join(failed[:4] + (["..."] if len(failed) > 4 else []))
        return f"FAILED: {'; '.join(filter(None, [what, found.get('ended', '')]))}{tail}"
    if not checks and not found.get("figures"):
        return f"skipped: {'; '.join(found.get('skipped', {}).values())}"
    return f"{len(checks)} checks passed{tail}, {found['seconds']:.0f} s"


def commit() -> str:
    """What was run: the commit, and whether files were changed since; "" outside of a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
        )
    except OSError:
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
