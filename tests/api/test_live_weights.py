"""Weights changed and memory released under a live server: a real model on the CPU, and an emulated one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from tests.support.live_server import EMULATED, LiveServer, ask_operator, serving, until  # noqa: E402

OPERATOR = "sk-a-key-of-an-operator"
KEYS = f"[[keys]]\ntenant = 'operator'\nkey = '{OPERATOR}'\nadmin = true\n"


class Operated:
    """A server with the key of an operator."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.client = httpx2.Client(base_url=server.url, headers={"Authorization": f"Bearer {OPERATOR}"}, timeout=120)

    def order(self, path: str, body: Any = None) -> tuple[int, Any]:
        return ask_operator(self.server.log.parent / "admin", path, OPERATOR, body)

    def ask(self, prompt: str, tokens: int = 12, **more: Any) -> Any:
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.client.post("/generate", json={"text": prompt, "sampling_params": params, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()


def operated(folder: Path, *arguments: str) -> Iterator[Operated]:
    (folder / "keys.toml").write_text(KEYS)
    access = ("--api-keys", str(folder / "keys.toml"), "--admin-socket", str(folder / "admin"))
    with serving(folder / "log", *access, "--shutdown-s", "1", *arguments) as server:
        made = Operated(server)
        yield made
        made.client.close()


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    yield from operated(tmp_path_factory.mktemp("emulated"), *EMULATED)


def test_an_emulated_engine_takes_as_long_as_its_weights_are_large(emulated: Operated) -> None:
    before = emulated.ask("hello")
    assert before["meta_info"]["weight_version"] == "0"
    status, said = emulated.order("/update_weights_from_disk", {"model_path": "step-7", "weight_version": "7"})
    assert (status, said["success"], said["weight_version"]) == (200, True, "7")
    assert emulated.client.get("/get_model_info").json()["weight_version"] == "7"
    assert emulated.order("/get_server_info")[1]["weight_version"] == "7"
    after = emulated.ask("hello")
    assert after["meta_info"]["weight_version"] == "7"
    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["cached_tokens"] == 0
    for body, what in (
        ({"model_path": "x", "weight_version": 7}, "must be above 7"),
        ({"model_path": "x", "weight_version": "seven"}, "`weight_version`"),
        ({"model_path": "x", "mode": "gently"}, "`mode`"),
        ({"model_path": ""}, "`model_path`"),
        ({}, "`model_path`"),
    ):
        status, said = emulated.order("/update_weights_from_disk", body)
        assert status == 400, said
        assert what in said["error"]["message"]
    status, said = emulated.order("/update_weights_from_tensor", {"serialized_named_tensors": ["gAN9"]})
    assert status == 400
    assert "pickle" in said["error"]["message"] or "shared_memory" in said["error"]["message"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_answers_across_an_update_and_a_kill_name_the_weights_of_each_token(emulated: Operated) -> None:
    """An emulated token is determined by prompt, position and weights version, so each one is predictable."""
    prompts = [f"stream {number}" for number in range(8)]

    def all_asked(meanwhile: Callable[[], object] = lambda: None) -> list[Any]:
        found: dict[str, Any] = {}
        threads = [threading.Thread(target=lambda p=p: found.update({p: emulated.ask(p, 1500)})) for p in prompts]
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join(120)
        return [found[prompt] for prompt in prompts]

    def launches() -> int:
        return int(emulated.order("/get_server_info")[1]["state"]["launches"])

    def slowed(seconds: float) -> None:  # so that no answer ends before `disturb` does
        assert emulated.order("/slow_down", {"forward_sleep_time": seconds})[0] == 200

    def disturb() -> None:
        before = launches()
        until(lambda: launches() > before + 20)
        assert emulated.order("/update_weights_from_disk", {"model_path": "x", "mode": "in_place"})[0] == 200
        before = launches()
        until(lambda: launches() > before + 20)
        os.kill(emulated.server.children()["engine"], signal.SIGKILL)
        until(lambda: "recovered 8 requests" in emulated.server.text())
        slowed(0.0)

    old = all_asked()
    slowed(0.05)
    mixed, new = all_asked(disturb), all_asked()
    for first, answer, last in zip(old, mixed, new, strict=True):
        one, other = answer["meta_info"]["weight_versions"]
        at = other["first_token"]
        assert (one["first_token"], 0 < at < 1500) == (0, True)
        assert one["weight_version"] == first["meta_info"]["weight_version"]
        assert other["weight_version"] == answer["meta_info"]["weight_version"] == last["meta_info"]["weight_version"]
        assert answer["output_ids"] == first["output_ids"][:at] + last["output_ids"][at:]


def test_the_example_of_the_guide_runs_as_printed(emulated: Operated, tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "features.md"
    section = page.read_text("utf-8").partition("\n## Live weights\n")[2]
    source = section.partition("```python\n")[2].partition("```")[0]
    for printed, here in (
        ("http://127.0.0.1:8000", emulated.server.url),
        ("admin.sock", str(emulated.server.log.parent / "admin")),
        ("sk-operator-of-this-server", OPERATOR),
    ):
        assert printed in source
        source = source.replace(printed, here)
    (tmp_path / "example.py").write_text(source, "utf-8")
    done = subprocess.run([sys.executable, tmp_path / "example.py"], capture_output=True, text=True, timeout=120)
    before, after, told = done.stdout.split()
    assert int(after) == int(before) + 1 == int(told), done.stdout + done.stderr


def test_requests_wait_while_memory_is_released(emulated: Operated) -> None:
    wanted = emulated.ask("wait for me")["output_ids"]
    assert emulated.order("/is_sleeping") == (200, {"is_sleeping": False})
    assert emulated.order("/release_memory_occupation")[0] == 200
    assert emulated.order("/is_sleeping") == (200, {"is_sleeping": True})
    assert emulated.order("/get_server_info")[1]["state"]["memory_released"] == ["kv_cache", "weights"]
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(emulated.ask("wait for me")))
    asking.start()
    until(lambda: emulated.order("/get_server_info")[1]["state"]["waiting"] == 1)
    assert emulated.order("/update_weights_from_disk", {"model_path": "x"})[0] == 400  # memory of weights is released
    assert emulated.order("/resume_memory_occupation", {"tags": ["weights"]})[0] == 200
    assert not found
    assert emulated.order("/wake_up")[0] == 200
    asking.join(120)
    assert found[0]["output_ids"] == wanted
    status, said = emulated.order("/release_memory_occupation", {"tags": ["graphs"]})
    assert (status, "tags" in said["error"]["message"]) == (400, True)
    assert emulated.order("/sleep?level=2")[0] == 400


# ------------------------------------------------------------------------------------------------------------- a model


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    from tests.support.weights import other_weights

    return other_weights(tmp_path_factory.mktemp("weights") / "step-1", seed=1)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Operated]:
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    journal = ("--journal", str(tmp_path / "run"))
    yield from operated(tmp_path, "--device", "cpu", "--numerics", "invariant", *journal)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_model_has_the_weights_of_its_journal_after_a_kill(model: Operated, other: Path, tmp_path: Path) -> None:
    first = model.ask("def f(")
    body = {"name": "model.norm.weight", "truncate_size": 2}
    old = model.order("/get_weights_by_name", body)[1]
    status, said = model.order("/update_weights_from_disk", {"model_path": str(other)})
    assert (status, said.get("weight_version")) == (200, "1"), said
    new = model.order("/get_weights_by_name", body)[1]
    assert (new["version"], new["shape"], len(new["parameter"])) == ("1", old["shape"], 2)
    assert new["parameter"] != old["parameter"]
    second = model.ask("def f(")
    assert second["output_ids"] != first["output_ids"]
    said = model.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).json()
    assert said["choices"][0]["weight_version"] == "1"
    messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "model": "demo"}
    for path, body in (
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/messages", messages),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ):
        assert model.client.post(path, json=body).json()["weight_version"] == "1", path

    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(model.ask("def f(", 200)))
    asking.start()
    until(lambda: model.order("/get_server_info")[1]["state"]["launches"] > 40)
    os.kill(model.server.children()["engine"], signal.SIGKILL)
    asking.join(120)
    assert found[0]["output_ids"][:12] == second["output_ids"]
    assert (len(found[0]["output_ids"]), found[0]["meta_info"]["weight_version"]) == (200, "1")
    assert model.ask("def f(")["output_ids"] == second["output_ids"]
    assert model.client.get("/get_model_info").json()["weight_version"] == "1"

    for path, what in ((tmp_path, "has no config.json"), (Path("here"), "must begin with /")):
        status, said = model.order("/update_weights_from_disk", {"model_path": str(path)})
        assert (status, what in said["error"]["message"]) == (400, True), said
    bad = shutil.copytree(other, tmp_path / "bad")
    (bad / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes()[:5000])
    status, said = model.order("/update_weights_from_disk", {"model_path": str(bad)})
    assert (status, "model.safetensors" in said["error"]["message"]) == (400, True), said
    assert model.ask("def f(")["output_ids"] == second["output_ids"]
