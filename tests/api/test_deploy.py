"""docs/deploy.md: its commands exist, its settings are valid, and its proxy passes streams."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import click
import pytest

pytest.importorskip("fastapi", reason="the server is not installed")

from click.testing import CliRunner

from lockstep.api.serve import serve
from lockstep.api.settings import ServeSettings, read_settings
from tests.support.live_server import LiveServer

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text("utf-8")
KEYS = "[[keys]]\ntenant = 'a'\nkey = 'sk-a-key-of-a-tenant'\n"
INSTRUCTIONS = {"FROM", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}


def blocks(language: str) -> list[str]:
    """The contents of the fences of a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [block.replace("\\\n", " ") for kind, block in found if kind == language]


def block(language: str) -> str:
    (found,) = blocks(language)
    return found


# ------------------------------------------------------------------------------------------------------------ commands


def commands() -> list[list[str]]:
    """Every `lockstep ...` of the page, split into arguments; `podman run ... lockstep` is `serve`."""
    printed = [line for one in blocks("") for line in one.splitlines() if line.startswith("lockstep ")]
    printed += re.findall(r"`(lockstep [^`]+)`", PAGE)
    printed += re.findall(r"^ExecStart=\S*/(lockstep .*)$", PAGE, re.MULTILINE)
    found = [shlex.split(line, comments=True) for line in printed]
    (container,) = (line for one in blocks("") for line in one.splitlines() if line.startswith("podman run"))
    words = shlex.split(container)
    return [*found, ["lockstep", "serve", *words[words.index("lockstep") + 1 :]]]


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that these arguments name, and its own arguments."""
    _, name, *rest = words
    declared = [tomllib.loads(path.read_text("utf-8")) for path in ROOT.glob("**/pyproject.toml")]
    entries = {
        key: value
        for one in declared
        for key, value in one.get("project", {}).get("entry-points", {}).get("lockstep.commands", {}).items()
    }
    module, _, attribute = entries[name].partition(":")
    command = getattr(importlib.import_module(module), attribute)
    while isinstance(command, click.Group):
        command = command.commands[rest.pop(0)]
    assert isinstance(command, click.Command)
    return command, rest


def test_every_command_of_the_page_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.csv").write_text("arrival_s,input_tokens,output_tokens\n0,20,5\n")
    found = commands()
    assert {words[1] for words in found} >= {"serve", "plan", "bench", "workload", "journal", "explain"}
    for words in found:
        command, rest = command_of(words)
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= options, words
        if words[2:] and "DIR" not in words and "RUN" not in words and "journal" not in words:
            with command.make_context(words[1], list(rest)):  # checks values as well
                pass


def test_the_settings_of_the_page_would_start(tmp_path: Path) -> None:
    """Every `lockstep serve` of the page, with --dry-run, local files and an emulated model."""
    (tmp_path / "keys.toml").write_text(KEYS)
    (tmp_path / "keys.toml").chmod(0o600)
    here = {
        '"/srv/models/qwen3-8b"': '"qwen3-8b@h200"',
        "/etc/lockstep/keys.toml": str(tmp_path / "keys.toml"),
        "/var/lib/lockstep/journal": str(tmp_path / "journal"),
        "/run/lockstep/admin": str(tmp_path / "admin"),
    }
    written = block("toml").replace("model = ", "emulate = ")
    for printed, other in here.items():
        assert printed in written
        written = written.replace(printed, other)
    (tmp_path / "serve.toml").write_text(written)
    served = [words for words in commands() if words[1] == "serve" and words[2:]]
    assert len(served) >= 4
    places = {
        "/etc/lockstep/serve.toml": str(tmp_path / "serve.toml"),
        "/keys.toml": str(tmp_path / "keys.toml"),
        "--model": "--emulate",
        "DIR": "qwen3-8b@h200",
        "/models/qwen3-8b": "qwen3-8b@h200",
        "RUN": str(tmp_path),
    }
    for words in served:
        asked = [places.get(word, word) for word in words[2:]]
        result = CliRunner().invoke(serve, [*asked, *(() if "--dry-run" in asked else ("--dry-run",))])
        assert result.exit_code == 0, (words, result.output, result.exception)
        assert "qwen3-8b (emulated)" in result.output
    said = read_settings(tmp_path / "serve.toml", {})
    assert said.shutdown_s < int(re.search(r"TimeoutStopSec=(\d+)", PAGE)[1])  # type: ignore[index]  # it is there


# ------------------------------------------------------------------------------------------------------------- systemd


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = block("ini").replace("/opt/lockstep/bin/lockstep", sys.executable)

    def verify(text: str) -> str:
        (tmp_path / "lockstep.service").write_text(text)
        words = [analyze, "verify", "--man=no", str(tmp_path / "lockstep.service")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        return done.stderr + ("" if not done.returncode else f"status {done.returncode}")

    assert verify(unit) == ""
    assert "KillMood" in verify(unit.replace("KillMode=", "KillMood="))  # shows that the check detects mistakes


def test_the_unit_may_write_where_the_settings_point() -> None:
    unit = dict(re.findall(r"^(\w+)=(.*)$", block("ini"), re.MULTILINE))
    settings = tomllib.loads(block("toml"))
    assert unit["ProtectSystem"] == "strict"
    assert settings["journal"].startswith(f"/var/lib/{unit['StateDirectory']}/")
    assert settings["admin_socket"].startswith(f"/run/{unit['RuntimeDirectory']}/")
    for cache in re.findall(r"=(/\S+)", unit["Environment"]):
        assert cache.startswith(f"/var/lib/{unit['StateDirectory']}")
    assert "AF_NETLINK" in unit["RestrictAddressFamilies"]  # used by the ranks to find interfaces
    assert set(settings) <= set(ServeSettings.__struct_fields__)


# ----------------------------------------------------------------------------------------------------------- container


def test_the_container_file_names_what_is_in_the_repository(emulated: LiveServer) -> None:
    lines = [line.strip() for line in block("dockerfile").splitlines() if line.strip() and line[0] != "#"]
    steps = dict(line.split(maxsplit=1) for line in lines)
    assert set(steps) == INSTRUCTIONS
    installed = next(line for line in lines if "pip install" in line)
    packages = re.findall(r"/src/([\w./-]+)(?:\[([\w,]+)\])?", installed.partition("&& rm")[0])
    assert {name for name, _ in packages} >= {"constraints.txt", "packages/gpu-runtime", "packages/api", "tools"}
    for name, extras in packages:
        if name.endswith(".txt"):
            assert (ROOT / name).is_file()
            continue
        project = tomllib.loads((ROOT / name / "pyproject.toml").read_text("utf-8"))["project"]
        assert set(filter(None, extras.split(","))) <= set(project.get("optional-dependencies", {}))
    assert json.loads(steps["ENTRYPOINT"])[1:] == ["serve"]
    assert steps["EXPOSE"] == str(ServeSettings().port)
    ignored = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line and line[0] != "#"]
    for name in (*(name for name, _ in packages), "packages/api/src/lockstep/api/endpoints/ui.html"):
        parts = ["/".join(name.split("/")[:count]) for count in range(1, name.count("/") + 2)]
        assert not any(fnmatch(part, pattern.removeprefix("**/")) for part in parts for pattern in ignored), name
    assert {".git", ".venv"} <= set(ignored)
    assert "--format docker" in PAGE  # podman's default format has no health check
    python, option, code = json.loads(steps["HEALTHCHECK"].partition("CMD ")[2])
    assert (python, option) == ("python", "-c")
    for url, status in ((emulated.url, 0), ("http://127.0.0.1:9", 1)):
        here = code.replace("http://127.0.0.1:8000", url)
        assert here != code
        done = subprocess.run([sys.executable, "-c", here], capture_output=True, timeout=120)
        assert done.returncode == status


# --------------------------------------------------------------------------------------------------------------- proxy


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as one:
        return not one.connect_ex(("127.0.0.1", port))


@contextmanager
def proxied(folder: Path, server: LiveServer) -> Iterator[str]:
    """The page's nginx in front of a server, with a certificate of its own."""
    nginx, openssl = shutil.which("nginx"), shutil.which("openssl")
    if nginx is None or openssl is None:
        pytest.skip("nginx or openssl is not installed")
    key, certificate, port = folder / "llm.key", folder / "llm.pem", free_port()
    request = [openssl, "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=llm.example.org"]
    subprocess.run([*request, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=120)
    text = block("nginx")
    for printed, here in (
        ("127.0.0.1:8000", server.url.removeprefix("http://")),
        ("443", f"127.0.0.1:{port}"),
        ("/etc/ssl/llm.key", str(key)),
        ("/etc/ssl/llm.pem", str(certificate)),
    ):
        assert printed in text
        text = text.replace(printed, here)
    temporary = "".join(
        f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    paths = f"daemon off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
    (folder / "nginx.conf").write_text(f"{paths}http {{\naccess_log off;\n{temporary}{text}}}\n")
    words = [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    tried = subprocess.run([*words, "-t"], capture_output=True, text=True, timeout=120)
    assert not tried.returncode, tried.stderr
    assert "[warn]" not in tried.stderr, tried.stderr
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + 20
        while not listens(port):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(120)


def test_a_stream_comes_through_the_proxy_as_it_is_made(emulated: LiveServer, tmp_path: Path) -> None:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with proxied(tmp_path, emulated) as url:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        headers = {"Content-Type": "application/json", "Host": "localhost"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        began_s = time.monotonic()
        with urllib.request.urlopen(request, timeout=120, context=trusting) as answer:
            first = answer.readline()
            first_s = time.monotonic() - began_s
            rest = answer.read()
            whole_s = time.monotonic() - began_s
            label = answer.headers["X-Request-Id"]
        assert first.startswith(b"data: {")
        assert rest.endswith(b"data: [DONE]\n\n")
        assert first_s < whole_s / 2
        assert re.fullmatch(r"[0-9a-f]{32}", label)  # the proxy's id, returned
        figures = urllib.request.Request(f"{url}/metrics", headers={"Host": "localhost"})
        with pytest.raises(urllib.error.HTTPError, match="403"):  # allowed from 10.0.0.0/8 only
            urllib.request.urlopen(figures, timeout=120, context=trusting)


def test_caddy_accepts_its_file(tmp_path: Path) -> None:
    caddy = shutil.which("caddy")
    if caddy is None:
        pytest.skip("caddy is not installed")
    (tmp_path / "Caddyfile").write_text(block("caddyfile"))
    words = [caddy, "validate", "--adapter", "caddyfile", "--config", str(tmp_path / "Caddyfile")]
    subprocess.run(words, check=True, capture_output=True, timeout=120)


def test_brackets_of_the_proxies_are_closed() -> None:
    """The check that remains possible where neither proxy is installed."""
    for language in ("nginx", "caddyfile"):
        text = re.sub(r"#.*", "", block(language))
        assert text.count("{") == text.count("}") > 0
        if language == "nginx":
            for line in filter(None, map(str.strip, text.splitlines())):
                assert line[-1] in "{};", line


# ------------------------------------------------------------------------------------------------------------ watching


def test_what_is_watched_is_there(emulated: LiveServer) -> None:
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    (job,) = yaml.safe_load(block("yaml"))["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{ServeSettings().port}"]}]
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{emulated.url}/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=120).read()
    shown = urllib.request.urlopen(f"{emulated.url}/metrics", timeout=120).read().decode()
    for name in set(re.findall(r"lockstep_[a-z_]+", PAGE.partition("## Monitoring")[2])):
        assert re.search(rf"^{name}{{", shown, re.MULTILINE), name
    for path in set(re.findall(r"`(/[a-z]+)`", PAGE)) - {"/src"}:
        assert emulated.status_of(path) == 200, path
    assert (ROOT / "docs" / "grafana" / "lockstep.json").is_file()
