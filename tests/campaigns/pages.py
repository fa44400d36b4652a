"""Every page that Lockstep writes or serves, in headless Chromium: axe-core, widths, colours, paper, script errors.

    python3 dev.py pages                      prints what is wrong, exit status 1 if anything is
    python3 dev.py pages --pictures shots     and keeps a picture of every view, and a PDF of every page

The pages are the report of a run, of a cluster and of a day of replicas, a comparison, an explanation, a plan, a plan
of splits, and the live page of a server under load. axe-core and puppeteer-core come from npm into a folder of the
user's cache; a machine without npm or Chromium skips the check.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from tests.support.live_server import EMULATED, serving

HERE = Path(__file__).resolve().parent
CHECKER = HERE / "pages.mjs"
NPM = ("axe-core@4.14.1", "puppeteer-core@24")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LOAD = "gen:n=300,rate=6,input=lognormal:900:0.75"
COMMANDS = (
    f"""
simulate --model qwen3-8b --gpu h100 --workload {LOAD} --slo ttft_p99=500ms --slo tpot_p99=40ms --out run
simulate --model qwen3-8b --gpu h200 --workload {LOAD} --out other
simulate --model qwen3-8b --gpu h100 --replicas 3 --router prefix_affinity --workload gen:n=600,rate=30 --out cluster
simulate --model qwen3-8b --gpu h100 --replicas 4 --autoscale open_requests=2,minimum=1,start=30s --no-intervals \\
    --price 0h=0.9,1h=2.1,2h=1 --workload gen:n=4000,rate=0.4 --out fleet
compare run other cluster --html compare.html
explain run --slowest ttft 5 --html explain.html
plan --model qwen3-32b --gpus h100,h200 --search tp=1,2,4 --workload gen:n=300,input=lognormal:3000:0.5 \\
    --slo ttft_p90=2s --slo tpot_p90=60ms --rate 6 --growth 2 --quick --requests 100 --all --report plan.html
plan --model llama-3.1-70b --gpus h200 --max-gpus 8 --search tp=2,4 --search prefill_decode=auto --quick --all \\
    --workload gen:n=300,input=lognormal:3000:0.5 --slo ttft_p90=4s --slo tpot_p90=80ms --requests 60 \\
    --report split.html
""".strip()
    .replace("\\\n", "")
    .split("\n")
)
PAGES = {
    "run": "run/report.html", "cluster": "cluster/report.html", "fleet": "fleet/report.html", "compare": "compare.html",
    "explain": "explain.html", "plan": "plan.html", "split": "split.html",
}  # fmt: skip
PROMPTS = 12


def main(arguments: list[str]) -> int:
    """Write the pages, check them, print the problems. Returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", default="", metavar="DIR", help="keep a picture of every view")
    given = parser.parse_args(arguments)
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None or shutil.which("npm") is None:
        print("the pages are not checked: this machine has no Chromium, or no npm")
        return 0
    modules = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lockstep" / "pages"
    modules.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", *NPM], cwd=modules, check=True)
    shutil.copy(CHECKER, modules / CHECKER.name)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for line in COMMANDS:
            done = subprocess.run(
                [Path(sys.executable).with_name("lockstep"), *line.split()],
                cwd=folder, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                raise SystemExit(f"`lockstep {line}` failed with status {done.returncode}:\n{done.stderr}")
        with serving(folder / "serve.log", *EMULATED) as server:
            for number in range(PROMPTS):
                body = json.dumps({"model": "qwen3-0.6b", "prompt": f"Request {number}", "max_tokens": 20}).encode()
                asked = urllib.request.Request(
                    f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(asked, timeout=120) as answer:
                    answer.read()
            pages = [f"{page}={(folder / file).as_uri()}" for page, file in PAGES.items()]
            pages.append(f"live={server.url}/ui")
            pictures = str(Path(given.pictures).resolve()) if given.pictures else ""
            done = subprocess.run(
                ["node", str(modules / CHECKER.name), browser, pictures, *pages],
                cwd=modules, stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
    views = [json.loads(line) for line in done.stdout.splitlines()]
    for view in views:
        for problem in view["problems"]:
            print(f"{view['name']} at {view['width']} px, {view['scheme']}: {problem}")
    wrong = sum(len(view["problems"]) for view in views)
    shown = [view for view in views if view["scheme"] != "paper"]
    rules = min(view["rules"] for view in shown)
    print(
        f"{len(shown)} views of {len(shown) // 6} pages, at least {rules} rules of axe-core each, and "
        f"{len(views) - len(shown)} printed pages: {wrong} problems"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
