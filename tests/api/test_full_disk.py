"""A full disk: streams wait, new requests are refused, and the server continues by itself when there is room."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")

from tests.support.live_server import EMULATED, serving, until

pytestmark = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small file system")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


def complete(url: str, **fields: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
    body = json.dumps({"prompt": "one", "ignore_eos": True, "seed": 5, **fields}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read()), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), dict(error.headers)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def test_streams_wait_until_there_is_room_again(small_disk: Path, tmp_path: Path) -> None:
    settings = ("--journal", str(small_disk / "run"), "--restarts", "2", "--shutdown-s", "1")
    with serving(tmp_path / "log", *EMULATED, *settings) as server:
        expected = complete(server.url, max_tokens=400)[1]["choices"][0]["text"]
        answers: list[tuple[int, dict[str, Any], dict[str, str]]] = []
        thread = threading.Thread(target=lambda: answers.append(complete(server.url, max_tokens=400)))
        thread.start()
        time.sleep(0.3)
        fill(small_disk / "ballast")
        until(lambda: server.status_of("/ready") == 503, 60)
        with urllib.request.urlopen(server.url + "/metrics", timeout=60) as found:
            assert 'lockstep_journal_blocked{engine="0"' in (text := found.read().decode())
            assert next(line for line in text.splitlines() if line.startswith("lockstep_journal_blocked{")).endswith(
                "1.0"
            )
        status, answer, headers = complete(server.url, max_tokens=1)
        assert (status, "retry-after" in {name.lower() for name in headers}) == (503, True)
        assert "the server's journal cannot be written" in answer["error"]["message"]
        time.sleep(4.0)  # longer than two restarts took before
        fill(small_disk / "ballast")
        assert server.process.poll() is None
        assert thread.is_alive(), answers
        (small_disk / "ballast").unlink()
        until(lambda: server.status_of("/ready") == 200, 60)
        thread.join(60)
        assert answers[0][0] == 200, answers
        assert answers[0][1]["choices"][0]["text"] == expected
        assert complete(server.url, max_tokens=400)[1]["choices"][0]["text"] == expected
        assert server.text().count("next try is in") <= 4, "tries are spaced out"
