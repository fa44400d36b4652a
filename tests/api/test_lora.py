"""LoRA adapters over HTTP: named like a model, loaded and unloaded under other streams, and kept over a kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from lockstep.core.journal.replay import replay  # noqa: E402
from tests.support.live_server import EMULATED, LiveServer, ask_operator, serving, until  # noqa: E402

OPERATOR = "sk-a-key-of-an-operator"
KEYS = f"[[keys]]\ntenant = 'operator'\nkey = '{OPERATOR}'\nadmin = true\n"


class Operated:
    """A server with the key of an operator."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.client = httpx2.Client(base_url=server.url, headers={"Authorization": f"Bearer {OPERATOR}"}, timeout=120)

    def order(self, path: str, **body: Any) -> tuple[int, Any]:
        return ask_operator(self.server.log.parent / "admin", path, OPERATOR, body)

    def complete(self, model: str | None = None, status: int = 200, tokens: int = 8, **more: Any) -> Any:
        """Token ids, or the error."""
        body = {
            "prompt": "def f(",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = self.client.post("/v1/completions", json=body | ({"model": model} if model else {}) | more)
        assert answer.status_code == status, answer.text
        return answer.json()["choices"][0]["token_ids"] if status == 200 else answer.json()["error"]["message"]

    def models(self) -> dict[str, str | None]:
        """Each model's parent."""
        return {one["id"]: one["parent"] for one in self.client.get("/v1/models").json()["data"]}

    def figure(self, name: str, engine: int = 0) -> float:
        """A figure of /metrics, over its other labels."""
        lines = re.findall(rf'^{name}{{engine="{engine}".*}} (.*)$', self.client.get("/metrics").text, re.MULTILINE)
        assert lines, name
        return sum(map(float, lines))

    def kill(self) -> None:
        """End the engine, and wait for the next one."""
        engine = self.server.children()["engine"]
        os.kill(engine, signal.SIGKILL)
        until_s = time.monotonic() + 30
        while self.server.children().get("engine", engine) == engine or self.server.status_of("/ready") != 200:
            assert time.monotonic() < until_s
            time.sleep(0.05)


@contextmanager
def operated(folder: Path, *arguments: str) -> Iterator[Operated]:
    (folder / "keys.toml").write_text(KEYS)
    access = ("--api-keys", str(folder / "keys.toml"), "--admin-socket", str(folder / "admin"))
    with serving(folder / "log", *access, "--shutdown-s", "1", *arguments) as server:
        made = Operated(server)
        yield made
        made.client.close()


def test_an_emulated_engine_has_adapters_in_time(tmp_path: Path) -> None:
    more = ("--speed", "10", "--lora", "law=of/law", "--journal", str(tmp_path / "run"))
    with operated(tmp_path, *EMULATED, *more) as emulated:
        base = next(name for name, parent in emulated.models().items() if parent is None)
        assert emulated.models() == {base: None, "law": base}
        plain, law = emulated.complete(), emulated.complete("law")
        assert plain == emulated.complete(base) != law
        assert law == emulated.complete(f"{base}:law") == emulated.complete(lora_path="law")
        assert "`nobody` does not exist" in emulated.complete("nobody", 404)
        assert "`lora_path` is 'nobody'" in emulated.complete(None, 400, lora_path="nobody")
        native = {"text": "def f(", "lora_path": "law", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
        assert emulated.client.post("/generate", json=native).json()["output_ids"] == law
        assert emulated.client.get("/v1/models/law").json()["root"] == "law"

        status, said = emulated.order("/v1/load_lora_adapter", lora_name="med", lora_path="of/med")
        assert (status, said["loaded_adapters"]) == (200, {"law": "of/law", "med": "of/med"}), said
        assert emulated.complete("med") not in (plain, law)
        for path, body, expected, what in (
            ("/load_lora_adapter", {"lora_name": "med", "lora_path": "of/med"}, 400, "is loaded already"),
            ("/load_lora_adapter", {"lora_name": base, "lora_path": "x"}, 400, "the model's own name"),
            ("/load_lora_adapter", {"lora_name": "x"}, 400, "`lora_path`"),
            ("/unload_lora_adapter", {"lora_name": "x"}, 404, "is not loaded"),
        ):
            status, said = emulated.order(path, **body)
            assert (status, what in said["error"]["message"]) == (expected, True), said
        assert emulated.order("/unload_lora_adapter", lora_name="law")[0] == 200
        emulated.kill()
        # law stays unloaded, although it is in the server's settings
        assert emulated.models() == {base: None, "med": base}
        assert "`law` does not exist" in emulated.complete("law", 404)
        newer = {"lora_name": "med", "lora_path": "of/2", "load_inplace": True, "pinned": True}
        before = emulated.complete("med")
        status, said = emulated.order("/load_lora_adapter", **newer)
        assert (status, said["message"]) == (200, "adapter med is loaded, version 2"), said
        assert emulated.complete("med") != before
        assert example(emulated, tmp_path).split() == [base, "med", "tone", "tone", base, "med", "404"]
    assert replay(tmp_path / "run").steps


def example(server: Operated, folder: Path) -> str:
    """What the guide's example prints."""
    page = Path(__file__).resolve().parents[2] / "docs" / "features.md"
    source = page.read_text("utf-8").partition("\n## LoRA\n")[2].partition("```python\n")[2].partition("```")[0]
    for printed, here in (
        ("http://127.0.0.1:8000", server.server.url),
        ("admin.sock", str(server.server.log.parent / "admin")),
        ("sk-operator-of-this-server", OPERATOR),
    ):
        assert printed in source
        source = source.replace(printed, here)
    (folder / "example.py").write_text(source, "utf-8")
    done = subprocess.run([sys.executable, folder / "example.py"], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    return done.stdout


def test_each_of_several_engines_has_the_adapters(tmp_path: Path) -> None:
    with operated(tmp_path, *EMULATED, "--speed", "10", "--lora", "law=of/law", "--dp", "2") as two:
        base = "qwen3-0.6b"
        plain, law = two.complete(), two.complete("law")
        assert two.order("/load_lora_adapter", lora_name="med", lora_path="of/med")[0] == 200
        assert two.order("/load_lora_adapter?engine=1", lora_name="odd", lora_path="of/odd")[0] == 200
        assert two.models() == {base: None, "law": base, "med": base}  # `odd` is served once all engines have it

        def answered() -> list[float]:
            return [two.figure("lockstep_num_requests_total", engine) for engine in (0, 1)]

        before = answered()
        streams = [threading.Thread(target=two.complete, args=(name,), kwargs={"tokens": 400}) for name in ("med",) * 4]
        for one in streams:
            one.start()
        for one in streams:
            one.join(120)
        assert [now - then for now, then in zip(answered(), before, strict=True)] == [2, 2]

        os.kill(two.server.children()["engine 1"], signal.SIGKILL)
        asked = [two.complete("law") for _ in range(4)]  # some wait for the next generation
        until(lambda: two.figure("lockstep_engine_up", 1) == 1)
        assert [law] * 4 == asked != [plain] * 4
        assert two.models() == {base: None, "law": base, "med": base}
        status, said = two.order("/load_lora_adapter", lora_name="odd", lora_path="of/odd")
        assert (status, "odd" in two.models()) == (200, True), said
        assert two.order("/unload_lora_adapter", lora_name="odd")[0] == 200
        assert "`odd` does not exist" in two.complete("odd", 404)


def test_a_model_answers_by_adapters_for_the_official_client(tmp_path: Path) -> None:
    """Includes drafts, which change no token: the tokens equal those of merged models without drafts."""
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    openai = pytest.importorskip("openai", reason="the official client is not installed")
    from lockstep.runtime import LLM, Params
    from tests.support.adapters import merged, write_adapter

    folders = {name: write_adapter(tmp_path / name, seed) for seed, name in enumerate(("one", "two"))}
    expected = {}
    for name, folder in folders.items():
        with LLM(merged(tmp_path / f"merged-{name}", folder), device="cpu", grammar_backend="none") as llm:
            (answer,) = llm.generate("def f(", Params(max_new_tokens=40, ignore_eos=True))
            expected[name] = answer.token_ids
    journal = ("--journal", str(tmp_path / "run"), "--device", "cpu", "--numerics", "invariant")
    drafts = ("--set", "speculative_method=ngram")
    with operated(tmp_path, "--lora", f"one={folders['one']}", "--set", "max_loras=2", *drafts, *journal) as model:
        client = openai.OpenAI(base_url=f"{model.server.url}/v1", api_key=OPERATOR, timeout=300)
        assert [one.id for one in client.models.list()] == ["demo", "one"]
        asked: dict[str, Any] = {"prompt": "def f(", "max_tokens": 40, "temperature": 0}
        asked["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
        found: list[int] = []

        def stream() -> None:
            for chunk in client.completions.create(model="one", stream=True, **asked):
                assert chunk.model == "one"
                found.extend(getattr(chunk.choices[0], "token_ids", None) or ())

        streams = threading.Thread(target=stream)
        streams.start()
        status, said = model.order("/load_lora_adapter", lora_name="two", lora_path=str(folders["two"]))
        assert status == 200, said
        whole = client.completions.create(model="two", **asked).choices[0]
        assert whole.token_ids == expected["two"]  # type: ignore[attr-defined]
        os.kill(model.server.children()["engine"], signal.SIGKILL)
        streams.join(120)
        assert found == expected["one"]
        assert client.completions.create(model="two", **asked).choices[0].token_ids == expected["two"]  # type: ignore[attr-defined]
        assert model.figure("lockstep_spec_decode_num_draft_tokens_total") > 0
        chat = client.chat.completions.create(model="two", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
        assert chat.model == "two"
        wrong = write_adapter(tmp_path / "wrong", 3, rank=20)
        paths = {str(wrong): "`r` is 20", str(tmp_path): "has no adapter_config.json", "here": "begin with /"}
        for path, what in paths.items():
            status, said = model.order("/load_lora_adapter", lora_name="wrong", lora_path=path)
            assert (status, what in said["error"]["message"]) == (400, True), said
        assert model.order("/unload_lora_adapter", lora_name="one")[0] == 200
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="one", **asked)
    assert replay(tmp_path / "run").steps
