"""The processes of a server: their sockets, and the consequences when one of them ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")
zmq = pytest.importorskip("zmq", reason="the server is not installed")

from lockstep.api.processes import launch  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from tests.support.live_server import EMULATED, RUN_SERVE, LiveServer, ask_operator, running, serving, until  # noqa: E402

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
pytestmark = linux

ENDLESS = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True}


class Stream:
    """A client that reads a stream to its end."""

    def __init__(self, url: str, **fields: Any) -> None:
        self.lines: list[str] = []
        self.broken = False
        self._body = {**ENDLESS, "stream": True, **fields}
        self._url = url
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        until(lambda: len(self.lines) > 3)

    def _read(self) -> None:
        try:
            with httpx2.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=120) as answer:
                self.lines += (line for line in answer.iter_lines() if line)
        except httpx2.TransportError:
            self.broken = True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with serving(tmp_path / "log", *EMULATED, "--shutdown-s", "1") as made:
        yield made


def sockets_of(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def test_one_socket_on_loopback_a_folder_for_the_owner_and_an_end_in_order(server: LiveServer) -> None:
    """After Ctrl-C answers get their time; open ones then end with an error, and nothing is left."""
    children, folder = server.children(), server.folder()
    port = int(server.url.rpartition(":")[2])
    assert listening({server.process.pid, *children.values()}) == [("tcp", f"0100007F:{port:04X}")]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {path.name for path in folder.iterdir() if ".sqlite" not in path.name}
    assert names == {"engine", "worker-0", "ready-0", "settings.json", "journal", "kept", "files"}
    stored = list(folder.glob("*.sqlite*"))
    assert {path.name.partition(".")[0] for path in stored} == {"responses", "conversations"}
    for path in stored:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "kept").stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "journal").stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "settings.json").stat().st_mode) == 0o600

    short, endless = Stream(server.url, max_tokens=60), Stream(server.url)
    assert server.end(signal.SIGINT) == 130
    short.thread.join(120)
    endless.thread.join(120)
    assert short.lines[-1] == "data: [DONE]"
    assert "[DONE]" not in " ".join(endless.lines[:-1])
    assert json.loads(endless.lines[-2].removeprefix("data: "))["error"]["message"] == "the server stops"
    assert endless.lines[-1] == "data: [DONE]"
    assert "Traceback" not in server.text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in children.values())
    assert server.status_of("/health") == 0
    assert not folder.exists()


def listening(pids: set[int]) -> list[tuple[str, str]]:
    """Network addresses that these processes listen on."""
    inodes = set.union(*map(sockets_of, pids))
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes and (table.startswith("udp") or words[3] == "0A"):
                found.append((table, words[1]))
    return found


def test_when_the_engine_dies_for_good_streams_end_with_an_error(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *EMULATED, "--shutdown-s", "1", "--restarts", "0") as server:
        stream = Stream(server.url)
        os.kill(server.children()["engine"], signal.SIGKILL)
        assert server.process.wait(120) == 1
    stream.thread.join(120)
    *_, error, done = stream.lines
    assert done == "data: [DONE]"
    said = json.loads(error[6:])["error"]
    assert (said["code"], said["type"]) == (503, "ServiceUnavailableError")
    assert "SIGKILL" in said["message"]
    assert not stream.broken


def test_when_a_worker_dies_its_requests_are_cancelled_and_another_comes(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *EMULATED, "--api-workers", "2", "--shutdown-s", "0") as server:
        until(lambda: len(server.children()) == 4)
        streams = [Stream(server.url) for _ in range(3)]
        until(lambda: running(server) == 3)
        victim = server.children()["worker 0"]
        os.kill(victim, signal.SIGKILL)
        until(lambda: "worker 2" in server.children())
        until(lambda: running(server) == sum(not stream.broken for stream in streams))
        assert server.status_of("/health") == 200
        assert (
            httpx2.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=120).status_code
            == 200
        )
        shared = server.folder() / "metrics"
        assert stat.S_IMODE(shared.stat().st_mode) == 0o700


ENDS_AT_ONCE = """
import sys
if "lockstep.api.worker" in sys.orig_argv:
    raise SystemExit(3)
"""


def test_a_worker_that_ends_before_it_is_ready_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(ENDS_AT_ONCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    ended = subprocess.run([*RUN_SERVE, *EMULATED], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("worker 0 ended with") == 1
    assert "worker 1" not in ended.stderr


KILLED_EARLY = """
import os, signal, sys
words = sys.orig_argv
if "{module}" in words:
    with open("{starts}", "a+") as file:
        file.write(words[-1] + "\\n")
        file.seek(0)
        count = len(file.readlines())
    if {first} <= count < {stop}:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_starts(module: str, first: int, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kill processes of a module as they start, from start `first` to before `stop`. Returns a file, a line a start."""
    starts = tmp_path / "starts"
    planted = KILLED_EARLY.format(module=module, starts=starts, first=first, stop=stop)
    (tmp_path / "sitecustomize.py").write_text(planted)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return starts


def test_a_replacement_that_is_killed_before_it_is_ready_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out: the system kills a worker, and its first two replacements as they start."""
    starts = kill_starts("lockstep.api.worker", 2, 4, tmp_path, monkeypatch)
    with serving(tmp_path / "log", *EMULATED, "--shutdown-s", "0") as server:
        os.kill(server.children()["worker 0"], signal.SIGKILL)
        until(lambda: server.text().count(": ready: ") == 2)
        answer = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=120)
        assert answer.status_code == 200
        assert len(starts.read_text().splitlines()) == 4


def test_replacements_that_are_never_ready_end_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = kill_starts("lockstep.api.worker", 2, 1000, tmp_path, monkeypatch)
    with serving(tmp_path / "log", *EMULATED, "--shutdown-s", "0") as server:
        os.kill(server.children()["worker 0"], signal.SIGKILL)
        assert server.process.wait(120) == 1
        assert f"{launch.WORKER_TRIES} workers in a row ended before they were ready" in server.text()
    assert len(starts.read_text().splitlines()) == 1 + launch.WORKER_TRIES


def test_a_fork_server_that_is_killed_before_it_forks_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = kill_starts("lockstep.api.processes.fork_server", 2, 4, tmp_path, monkeypatch)
    with serving(tmp_path / "log", *EMULATED, "--shutdown-s", "0") as server:
        os.kill(server.children()["fork_server"], signal.SIGKILL)
        until(lambda: " s after the end of the previous generation" in server.text())
        answer = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=120)
        assert answer.status_code == 200
        assert len(starts.read_text().splitlines()) == 4


def test_fork_servers_that_never_fork_end_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_starts("lockstep.api.processes.fork_server", 2, 1000, tmp_path, monkeypatch)
    with serving(tmp_path / "log", *EMULATED, "--shutdown-s", "0", "--restarts", "3") as server:
        os.kill(server.children()["fork_server"], signal.SIGKILL)
        assert server.process.wait(120) == 1
        assert "3 restarts in 300 s are the limit" in server.text()


def test_when_the_operators_worker_dies_another_serves_the_operator(tmp_path: Path) -> None:
    keys, admin, key = tmp_path / "keys.toml", tmp_path / "admin", "sk-a-key-of-an-operator"
    keys.write_text(f"[[keys]]\ntenant = 'operator'\nkey = '{key}'\nadmin = true\n")
    access = ("--api-keys", str(keys), "--admin-socket", str(admin), "--api-workers", "2", "--shutdown-s", "0")
    with serving(tmp_path / "log", *EMULATED, *access) as server:
        until(lambda: len(server.children()) == 4)
        for number in (0, 1):  # the second key is not an operator's
            victim = server.children()[f"worker {number}"]
            os.kill(victim, signal.SIGKILL)
            until(lambda number=number: f"worker {number + 2}" in server.children())
            until(lambda: ask_operator(admin, "/is_paused", key) == (200, {"is_paused": False}))
    assert not admin.exists()


def test_the_operators_socket_of_a_server_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    left = launch.listen_unix(path)
    with pytest.raises(ConfigError, match=r"`admin_socket`: \S+ cannot be listened on: another server listens there"):
        launch.listen_unix(path)
    left.close()  # the file of the socket remains
    assert path.is_socket()
    with contextlib.closing(launch.listen_unix(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"`admin_socket`: \S+ cannot .*: the file exists, and is not a socket"):
        launch.listen_unix(path)
    assert path.read_text() == "mine"


def test_more_than_the_queue_holds_is_refused_with_a_time_to_come_again(tmp_path: Path) -> None:
    limits = ("--set", "max_running_requests=2", "--set", "max_queued_requests=2", "--shutdown-s", "0")
    with (
        serving(tmp_path / "log", *EMULATED, *limits) as server,
        httpx2.Client(base_url=server.url, timeout=120) as client,
        contextlib.ExitStack() as opened,
    ):
        heads = []
        for _ in range(4):  # two run, two wait: the streams of waiting requests begin before their first token
            answer = client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True})
            heads.append(opened.enter_context(answer).status_code)
        assert heads == [200] * 4
        for stream in (False, True):
            refused = client.post("/v1/completions", json={"prompt": "b", "stream": stream})
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert running(server) == 2
        assert server.status_of("/health") == server.status_of("/ready") == 200


def test_when_the_launcher_dies_its_children_do(server: LiveServer) -> None:
    children, folder = server.children(), server.folder()
    server.process.kill()
    until(lambda: not any(_runs(pid) for pid in children.values()))
    assert not folder.exists()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_unknown_message_ends_the_server_and_is_named(server: LiveServer) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(f"ipc://{server.folder() / 'engine'}")
    socket.send(b"\x92\xa9Overthrow\x01")
    assert server.process.wait(120) == 1
    assert "WireError: the engine got a message 'Overthrow', which it cannot read" in server.text()
    socket.close(0)
    context.term()


def test_a_port_that_is_taken_is_one_clear_error(emulated: LiveServer) -> None:
    port = emulated.url.rpartition(":")[2]
    code = "import sys; from lockstep.core.command import main; sys.exit(main(sys.argv[1:]))"
    finished = subprocess.run(
        [sys.executable, "-c", code, "serve", *EMULATED, "--port", port], capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 2
    assert finished.stderr.startswith(f"ConfigError: `port`: 127.0.0.1:{port} cannot be listened on")
    assert "hint:" in finished.stderr


def test_nothing_of_an_emulated_server_needs_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'triton', 'lockstep.runtime'): sys.modules[name] = None\n"
        "import lockstep.api.worker, lockstep.api.processes.launch, lockstep.api.serve\n"
        "from lockstep.api.engines import build_engine\n"
        "from lockstep.api.settings import ServeSettings\n"
        "print(build_engine(ServeSettings(emulate='qwen3-8b@h200')).info.model)\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert finished.stdout == "qwen3-8b\n", finished.stderr
