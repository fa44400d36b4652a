"""POST /collective_rpc: operators call functions of installed packages by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")

from lockstep.api.processes import rpc
from lockstep.core.contract.errors import ConfigError
from tests.support.live_server import EMULATED, ask_operator, serving

KEY = "sk-a-key-of-an-operator"
FUNCTIONS = """
import time

def about(unit, *names, prefix=""):
    return {prefix + name: getattr(unit.info, name) for name in names}

def fails(unit):
    raise ValueError("it does not work")

def odd(unit):
    return object()

def slow(unit):
    time.sleep(2)

number = 5
"""
NAMES = ("about", "fails", "odd", "slow")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("rpc")
    (folder / "calls.py").write_text(FUNCTIONS)
    about = folder / "calls-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: calls\nVersion: 1.0\n")
    names = "\n".join(f"{name} = calls:{name}" for name in (*NAMES, "number", "absent"))
    (about / "entry_points.txt").write_text(f"[lockstep.rpc]\n{names}\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patched.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def post(installed: Path) -> Iterator[Any]:
    (installed / "keys.toml").write_text(f"[[keys]]\ntenant = 'tests'\nkey = '{KEY}'\nadmin = true\n")
    enabled = [word for name in NAMES for word in ("--rpc-function", name)]
    operators = ("--api-keys", str(installed / "keys.toml"), "--admin-socket", str(installed / "admin"))
    with serving(installed / "log", *EMULATED, *operators, *enabled, "--shutdown-s", "1"):
        yield partial(ask_operator, installed / "admin", "/collective_rpc", KEY)


def test_a_function_gets_the_engine_and_the_arguments(post: Any) -> None:
    body = {"method": "about", "args": ["model", "vocabulary"], "kwargs": {"prefix": "its "}}
    status, said = post(body)
    assert (status, list(said["results"][0])) == (200, ["its model", "its vocabulary"])
    assert said["results"][0]["its model"] == "qwen3-0.6b"
    assert post({"method": "about"}) == (200, {"results": [{}]})


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"method": "number"}, 400, "'number', which is not enabled here; enabled: about, fails, odd, slow"),
        ({"method": "fails"}, 400, "`fails` failed: ValueError: it does not work"),
        ({"method": "about", "args": ["nothing"]}, 400, "`about` failed: AttributeError"),
        ({"method": "about", "kwargs": {"unknown": 1}}, 400, "`about` failed: TypeError"),
        ({"method": "odd"}, 400, "`odd` failed: TypeError"),
        ({"method": "slow", "timeout": 0.2}, 504, "took longer than its limit of 0.2 s"),
        ({"args": []}, 400, "`method`"),
    ],
)
def test_what_goes_wrong_is_one_answer(post: Any, body: Any, status: int, message: str) -> None:
    found, said = post(body)
    assert (found, message in said["error"]["message"]) == (status, True), said
    assert post({"method": "about"})[0] == 200


@pytest.mark.parametrize(
    ("name", "message"),
    [("unknown", "must be provided by an installed package"), ("number", "must name a function"), ("absent", "import")],
)
def test_a_name_without_a_function_is_refused_at_the_start(installed: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rpc.load([name])
