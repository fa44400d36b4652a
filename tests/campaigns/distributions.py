"""Build the distributions as they would be released, and use them in an environment that has nothing else.

    python3 dev.py dist                 sdists, wheels made from them, an empty environment, four commands
    python3 dev.py dist --no-install    sdists and wheels only
    python3 dev.py dist --extras serve,fast

Third-party packages come from the index of pip, in the versions of constraints.txt. Nothing of the checkout is used
after the wheels are built: the environment and the folder that the commands run in are temporary.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

from tests.test_notebooks import script_of

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("fast", "serve")
"""Extras that are installed by default: those whose requirements are small."""

PLAN = """
import lockstep
run = lockstep.simulate(model="qwen3-8b", gpu="h200", workload="gen:n=100,rate=4", slo="ttft_p99=500ms")
plan = lockstep.plan(model="qwen3-8b", gpus="h100,h200", workload="gen:n=300", slo="ttft_p99=500ms", rate=20)
assert plan.found, plan
assert run.requests.height == 100
print(plan.headline)
"""


QUESTION = """
model = "qwen3-8b"
gpus = ["h100", "h200"]
workload = "gen:n=300"
slo = ["ttft_p99=500ms"]
rate = 20
quick = true

[search]
tp = [1, 2]
"""


def packages() -> list[Path]:
    """Return the folders of all distributions, the one that names the others last."""
    found = [path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))] + [ROOT / "tools"]
    return sorted(found, key=lambda folder: folder.name == "lockstep")


def name_of(package: Path) -> str:
    """Return the name of a distribution."""
    return str(tomllib.loads((package / "pyproject.toml").read_text())["project"]["name"])


def build(package: Path, out: Path) -> tuple[Path, Path]:
    """Make the sdist of a package, and a wheel from that sdist. Return both.

    Raises: subprocess.CalledProcessError if the build fails.
    """
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(package)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    stem = name_of(package).replace("-", "_")
    (sdist,), (wheel,) = out.glob(f"{stem}-[0-9]*.tar.gz"), out.glob(f"{stem}-[0-9]*.whl")
    return sdist, wheel


def timed(title: str, command: list[str], *, cwd: Path, env: dict[str, str]) -> None:
    """Run a command, and print how long it took. Raises SystemExit with its output if it fails."""
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    print(f"{time.monotonic() - began:8.1f} s  {title}", flush=True)
    if done.returncode != 0:
        raise SystemExit(f"`{' '.join(command)}` failed with status {done.returncode}:\n{done.stdout}{done.stderr}")


def index_of(folder: Path, env: dict[str, str]) -> str:
    """Return the index that pip uses, for uv, which does not read pip's settings."""
    done = subprocess.run(
        [str(folder / "python"), "-m", "pip", "config", "get", "global.index-url"],
        capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    return done.stdout.strip() or env.get("PIP_INDEX_URL") or "https://pypi.org/simple"


def use(wheels: Path, extras: str) -> None:
    """Install the wheels into an empty environment, and run commands there."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        began = time.monotonic()
        venv.create(place / "env", with_pip=True)
        print(f"{time.monotonic() - began:8.1f} s  an empty environment", flush=True)
        folder = place / "env" / ("Scripts" if os.name == "nt" else "bin")
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        wanted = f"lockstep[{extras}]" if extras else "lockstep"
        pip = [str(folder / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = ["--constraint", str(ROOT / "constraints.txt"), "--find-links", str(wheels)]
        timed(f"pip install {wanted}", [*pip, *constraints, wanted], cwd=place, env=clean)
        (place / "plan.py").write_text(PLAN)
        (place / "question.toml").write_text(QUESTION)
        notebook = ROOT / "examples" / "size_a_service.ipynb"
        (place / "notebook.py").write_text(script_of(notebook))
        lockstep = str(folder / "lockstep")
        uvx = [shutil.which("uv") or str(folder / "uv"), "tool", "run", "--find-links", str(wheels), "lockstep", "demo"]
        timed("pip install uv", [*pip, "uv"], cwd=place, env=clean)
        clean |= {
            "UV_CACHE_DIR": str(place / "uv"),
            "UV_INDEX_URL": index_of(folder, clean),
            "UV_PYTHON": sys.executable,
        }
        for title, command in (
            ("uv tool run lockstep demo", uvx),
            ("lockstep --version", [lockstep, "--version"]),
            ("a simulation and a plan by `import lockstep`", [str(folder / "python"), "plan.py"]),
            ("lockstep plan question.toml", [lockstep, "plan", "question.toml"]),
            ("pip install lockstep[notebook]", [*pip, *constraints, "lockstep[notebook]"]),
            (f"the notebook {notebook.stem}", [str(folder / "python"), "notebook.py"]),
            ("lockstep workload describe gen:n=100", [lockstep, "workload", "describe", "gen:n=100"]),
        ):
            timed(title, command, cwd=place, env=clean)


def main() -> None:
    """Build, and install unless `--no-install` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of sdists and wheels (default dist)")
    parser.add_argument(
        "--extras", default=",".join(EXTRAS), help=f"what to install besides (default {','.join(EXTRAS)})"
    )
    parser.add_argument("--no-install", action="store_true", help="only build")
    given = parser.parse_args()
    shutil.rmtree(given.out, ignore_errors=True)
    for package in packages():
        began = time.monotonic()
        for path in build(package, given.out):
            print(f"{time.monotonic() - began:8.1f} s  {path.name}, {path.stat().st_size:,} bytes", flush=True)
    if not given.no_install:
        use(given.out, given.extras)


if __name__ == "__main__":
    main()
