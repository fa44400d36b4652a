"""The commands and options that the documentation names, and small files under the names that they read."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zstandard

from lockstep.host.recording import Arrived, Ended, PassFinished, Planned, RecordingHeader, RecordingWriter

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    # the commands of parity.md run in `python -m tests.parity --commands`; tests/test_parity.py checks their options
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "parity.md"),
]
FENCED = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
LINE = re.compile(r"^ *(?:\$ |ExecStart=\S*/)?lockstep (.*)$", re.MULTILINE)
SESSIONS = 8  # of the small traces


@dataclass(frozen=True)
class Command:
    """A command line of `lockstep` that a page shows."""

    page: str
    text: str  # without `lockstep`, comments and continuation lines
    inline: bool = False  # from running text, where required arguments may be missing

    @property
    def words(self) -> list[str]:
        """Its arguments."""
        return shlex.split(self.text)

    @property
    def name(self) -> str:
        """Identifies it in the output of pytest."""
        return f"{self.page}: {self.text}"


def commands() -> list[Command]:
    """Return the different command lines of all pages: lines of code blocks, and inline code with arguments."""
    found: dict[str, Command] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = [block.replace("\\\n", " ") for block in FENCED.findall(text)]
        indented = "\n".join(line for line in FENCED.sub("", text).splitlines() if line.startswith("    "))
        for line in (line for block in (*blocks, indented) for line in lines_of(block)):
            found.setdefault(line, Command(page.name, line))
        for code in inline_codes(text):
            if code.startswith("lockstep "):
                words = code.removeprefix("lockstep ")
                found.setdefault(words, Command(page.name, words, inline=True))
    return list(found.values())


def lines_of(text: str) -> list[str]:
    """Return the command lines in a code block, or in the help of a command, without `lockstep` and remarks."""
    return [re.sub(r"\s+", " ", _without_remark(line)).strip() for line in LINE.findall(text)]


def _without_remark(line: str) -> str:
    """Return the line without a comment, or the remark that follows after several spaces."""
    line = re.sub(r" #.*$", "", line)
    return re.sub(r"(?<=\S) {3,}[^-\s].*$", "", line)


def inline_codes(text: str) -> Iterator[str]:
    """Yield the inline code of a page, which a line end may divide."""
    for paragraph in re.split(r"\n\s*\n|\n\|", FENCED.sub("", text)):
        yield from INLINE.findall(re.sub(r"\s*\n\s*", " ", paragraph))


# ------------------------------------------------------------------------------------------------- files that they read


QUESTION = """
model = "qwen3-8b"
gpus = "h100"
workload = "usage.jsonl"
slo = ["ttft_p99=500ms"]
rate = 4
"""


CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_hidden_layers": 8, "vocab_size": 32000, "max_position_embeddings": 8192,
}  # fmt: skip


def write_files(folder: Path) -> None:
    """Write a small file of the right format for each trace that the pages name."""
    mooncake = [
        {"timestamp": 30_000 * n, "input_length": 900, "output_length": 20 + n, "hash_ids": [0, n + 1]}
        for n in range(60)
    ]
    agentic = [
        {"trace": f"s{n}", "agent": "", "in": 640, "out": 20, "hash_runs": [[100 * n, 10]], "think_time": 1.0, "t": t}
        for n in range(SESSIONS)
        for t in (0.0, 5.0)
    ]
    sharegpt = [
        {"input_toks": 3, "output_toks": 9, "arrival_time_ns": 10**9 * n, "input_tok_ids": [5, 6, n]} for n in range(30)
    ]
    for name in ("conversation_trace", "conversation", "conv", "trace", "chat"):
        _packed(folder / f"{name}.jsonl.gz", _lines(mooncake))
    (folder / "small.jsonl").write_text(_lines(mooncake))
    for name in ("agentic_developers", "agents"):
        _packed(folder / f"{name}.jsonl.gz", _lines(agentic))
    _packed(folder / "sharegpt.jsonl.gz", _lines(sharegpt))
    azure = [("TIMESTAMP", "ContextTokens", "GeneratedTokens")]
    azure += [(f"2023-11-16 18:{17 + n // 60:02}:{n % 60:02}.0000000", str(800 + n), "10") for n in range(60)]
    _packed(folder / "AzureLLMInferenceTrace_code.csv.gz", _rows(azure))
    for name in ("azure.csv", "azure-code.csv"):
        (folder / name).write_text(_rows(azure))
    lengths = [("", "num_prefill_tokens", "num_decode_tokens", "pd_ratio")]
    lengths += [(str(n), str(300 + n), "20", "9.0") for n in range(60)]
    _packed(folder / "vidur_lengths.csv.gz", _rows(lengths))
    plain = [("arrival_s", "input_tokens", "output_tokens", "tenant")]
    plain += [(str(0.2 * n), str(400 + n), "20", f"team-{n % 3}") for n in range(60)]
    (folder / "requests.csv").write_text(_rows(plain))
    usage = [
        {"created": 1764151200 + n, "usage": {"prompt_tokens": 400 + n, "completion_tokens": 20}} for n in range(60)
    ]
    for name in ("usage.jsonl", "requests.jsonl"):
        (folder / name).write_text(_lines(usage))
    own = [("when", "n_in", "n_out"), *((str(1000 * n), str(400 + n), "20") for n in range(60))]
    (folder / "log.csv").write_text(_rows(own))
    (folder / "usage.csv").write_text(_rows([("ts", "prompt_tokens", "completion_tokens"), *own[1:]]))
    chats = [
        {"ts": n, "messages": [{"role": "user", "content": "Hello " * (40 + n)}], "response": "Hi"} for n in range(60)
    ]
    (folder / "chats.jsonl").write_text(_lines(chats))
    stamps = [f"26/Nov/2026:10:{n // 60:02}:{n % 60:02} +0000" for n in range(60)]
    post = '"POST /v1/completions HTTP/1.1" 200 480 "-" "curl"'
    (folder / "access.log").write_text("".join(f"10.0.0.1 - - [{stamp}] {post}\n" for stamp in stamps))
    (folder / "question.toml").write_text(QUESTION)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    for name in ("servegen", "servegen_deepseek-r1", "servegen_mm-image"):
        (folder / f"{name}.tar.zst").write_bytes(_servegen(image="image" in name))


def write_recording(folder: Path) -> None:
    """Write a recording of another engine's scheduler: requests one after the other, with three passes each."""
    header = RecordingHeader(engine="vllm", model="qwen3-8b", page_size=16, pages=1000, gpu="h100")
    writer = RecordingWriter(folder, header, lambda why: None)
    for number in range(60):
        at_us, batch = 90_000 * number, 3 * number
        prompt_tokens = 200 + 10 * number
        writer.append(Arrived(time_us=at_us, name=str(number), prompt_tokens=prompt_tokens, max_new_tokens=3))
        for step in range(3):
            row = (number, 0, prompt_tokens, 0) if not step else (number, prompt_tokens + step - 1, 1, 0)
            planned_us = at_us + 30_000 * step
            took_us = 9_000 if step else 9_000 + 200 * number
            writer.append(Planned(time_us=planned_us, batch=batch + step, rows=(row,), running=1))
            done = PassFinished(
                time_us=planned_us + took_us, batch=batch + step, started_us=planned_us, tokens=((number, 1),)
            )
            writer.append(done)
        writer.append(Ended(time_us=at_us + 89_000, request=number, reason="length"))
    writer.close()


def _lines(rows: Sequence[Mapping[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _rows(rows: Sequence[tuple[str, ...]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _packed(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()))


def _servegen(*, image: bool) -> bytes:
    """One client with a request per 20 s, all day long."""
    windows = "".join(f"{600 * n},0.05,1.0,Gamma,1.0,20.0\n" for n in range(72))
    lengths: dict[str, str] = {"input_tokens": "{300: 1.0}", "output_tokens": "{20: 1.0}"}
    if image:
        lengths |= {"image_tokens": "{400: 1.0}"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in (("trace.csv", windows), ("dataset.json", json.dumps({"0": lengths}))):
            about = tarfile.TarInfo(f"service/chunk-0-{name}")
            about.size = len(text)
            archive.addfile(about, io.BytesIO(text.encode()))
    return zstandard.ZstdCompressor().compress(buffer.getvalue())
