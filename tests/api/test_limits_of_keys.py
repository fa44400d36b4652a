"""Limits of a key: rates, quotas, concurrent answers; a file of keys that changes; the recorded use."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from lockstep.api.endpoints.errors import ApiError  # noqa: E402
from lockstep.api.endpoints.keys import UNLIMITED, Allowance, read_keys  # noqa: E402
from lockstep.api.endpoints.usage import UsageCounter  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from tests.support.live_server import EMULATED, serving, until  # noqa: E402

NOON = 20_000 * 86_400 + 43_200.0


class Clock:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def refused(usage: UsageCounter, allowance: Allowance, **more: Any) -> float:
    """Seconds after which a refused request may be repeated."""
    with pytest.raises(ApiError) as caught:
        usage.admit("alice", allowance, more.get("prompt_tokens", 1), more.get("answers", 1))
    assert caught.value.status == 429
    assert caught.value.body()["error"]["type"] == "RateLimitError"
    return caught.value.retry_after_s


def test_requests_a_minute(tmp_path: Path) -> None:
    clock = Clock(NOON)
    usage, allowance = UsageCounter(tmp_path / "usage", clock), Allowance(requests_per_minute=3)
    for _ in range(3):
        usage.admit("alice", allowance, 1, 1)
    assert refused(usage, allowance) == pytest.approx(20.0)
    usage.admit("bob", allowance, 1, 1)
    clock.now_s += 19.9
    assert refused(usage, allowance) == pytest.approx(0.1)
    clock.now_s += 0.2
    usage.admit("alice", allowance, 1, 1)
    clock.now_s -= 3600.0  # a clock that goes back adds nothing
    refused(usage, allowance)
    clock.now_s += 3600.0 + 3600.0  # a long time adds no more than a minute does
    for _ in range(3):
        usage.admit("alice", allowance, 1, 1)
    refused(usage, allowance)


def test_less_than_one_request_a_minute_is_possible(tmp_path: Path) -> None:
    clock = Clock(NOON)
    usage, allowance = UsageCounter(tmp_path / "usage", clock), Allowance(requests_per_minute=0.5)
    usage.admit("alice", allowance, 1, 1)
    assert refused(usage, allowance) == pytest.approx(120.0)
    clock.now_s += 121.0
    usage.admit("alice", allowance, 1, 1)


def test_tokens_a_minute_are_prompts_at_once_and_answers_at_their_end(tmp_path: Path) -> None:
    clock = Clock(NOON)
    usage, allowance = UsageCounter(tmp_path / "usage", clock), Allowance(tokens_per_minute=600)
    over = usage.admit("alice", allowance, 1000, 1)  # the balance may go below zero: long prompts are admitted
    assert refused(usage, allowance) == pytest.approx(40.1)
    clock.now_s += 41.0
    usage.admit("alice", allowance, 1, 1)
    over(200)
    assert refused(usage, allowance) == pytest.approx(19.2)


def test_tokens_a_day_begin_again_at_midnight(tmp_path: Path) -> None:
    clock = Clock(NOON)
    usage, allowance = UsageCounter(tmp_path / "usage", clock), Allowance(tokens_per_day=100)
    usage.admit("alice", allowance, 60, 1)(39)
    usage.admit("alice", allowance, 1, 1)
    assert refused(usage, allowance) == pytest.approx(43_200.0)
    clock.now_s += 43_201.0
    usage.admit("alice", allowance, 1, 1)
    used = UsageCounter(tmp_path / "usage", clock).read("alice", allowance)  # as after a restart
    assert (used.requests, used.prompt_tokens, used.output_tokens, used.day_tokens) == (3, 62, 39, 1)


def test_answers_at_once(tmp_path: Path) -> None:
    usage, allowance = UsageCounter(tmp_path / "usage"), Allowance(answers_max=3)
    over = usage.admit("alice", allowance, 1, 2)
    refused(usage, allowance, answers=2)
    usage.admit("alice", allowance, 1, 1)
    over(5)
    usage.admit("alice", allowance, 1, 2)


def _count(folder: str) -> None:
    usage = UsageCounter(Path(folder))
    for _ in range(200):
        usage.admit("alice", UNLIMITED, 1, 1)(2)


def test_workers_count_in_the_same_place(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_count, args=(str(tmp_path / "usage"),)) for _ in range(3)]
    for one in workers:
        one.start()
    for one in workers:
        one.join(120)
    used = UsageCounter(tmp_path / "usage").read("alice", UNLIMITED)
    assert (used.requests, used.prompt_tokens, used.output_tokens) == (600, 600, 1200)
    assert (tmp_path / "usage").stat().st_mode & 0o777 == 0o700
    assert {one.stat().st_mode & 0o777 for one in (tmp_path / "usage").iterdir()} == {0o600}


# ------------------------------------------------------------------------------------------------------ a file of keys


def written(path: Path, *keys: str) -> None:
    """Replace the file, as editors do."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"[[keys]]\n{one}\n" for one in keys))
    new.replace(path)


ALICE = "tenant = 'alice'\nkey = 'sk-alice-alice-alice'"
BOB = "tenant = 'bob'\nkey = 'sk-bob-bob-bob-bob-bob'"


def test_a_file_that_changed_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "keys.toml", Clock(0.0)
    written(path, ALICE)
    keys = read_keys(path)
    keys._now_s = clock
    keys._looked_s = 0.0

    def tenants() -> list[str | None]:
        clock.now_s += 1.5
        return [keys.tenant_of(f"Bearer {key}") for key in ("sk-alice-alice-alice", "sk-bob-bob-bob-bob-bob")]

    assert tenants() == ["alice", None]
    written(path, ALICE, BOB + "\nanswers_max = 5")
    assert keys.tenant_of("Bearer sk-bob-bob-bob-bob-bob") is None  # the file was read less than a second ago
    assert tenants() == ["alice", "bob"]
    assert (keys.allowance("bob"), keys.allowance("alice")) == (Allowance(answers_max=5), UNLIMITED)
    path.write_text("[[keys]]\ntenant = 'alice'\nkey = 'short'\n")
    assert tenants() == ["alice", "bob"]
    assert "has less than 16 characters; the previous keys remain in use" in caplog.text.replace("\n", " ")
    assert "short" not in caplog.text
    path.unlink()
    assert tenants() == ["alice", "bob"]
    written(path, BOB)
    assert tenants() == [None, "bob"]
    assert keys.allowance("bob") == UNLIMITED


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([ALICE + "\nrequests_per_minute = 0"], "`requests_per_minute` of key 1 .* must be above 0, got `0.0`"),
        ([ALICE + "\ntokens_per_day = -1"], "`tokens_per_day` of key 1 .* must be above 0"),
        ([ALICE + "\nrequests_per_minute = nan"], "must be above 0, got `nan`"),
        ([ALICE + "\nanswers_max = 5", ALICE.replace("-", "+") + "\nanswers_max = 6"], "key 2 .* other limits"),
        ([ALICE + "\ntokens_per_minute = 'many'"], "Expected `int | null`"),
    ],
)
def test_invalid_limits(tmp_path: Path, keys: list[str], said: str) -> None:
    written(tmp_path / "keys.toml", *keys)
    with pytest.raises(ConfigError, match=said.replace("|", r"\|")):
        read_keys(tmp_path / "keys.toml")


def test_a_server_keeps_to_them(tmp_path: Path) -> None:
    """Two keys of one server: one of them is limited, and is unlimited later."""
    path = tmp_path / "keys.toml"
    written(path, ALICE + "\nrequests_per_minute = 2\nanswers_max = 1", BOB)
    settings = ("--api-keys", str(path), "--usage-dir", str(tmp_path / "usage"), "--shutdown-s", "0")
    with (
        serving(tmp_path / "log", *EMULATED, *settings) as server,
        httpx2.Client(base_url=server.url, timeout=120) as client,
    ):

        def complete(tenant: str, **more: Any) -> Any:
            key = {"alice": "sk-alice-alice-alice", "bob": "sk-bob-bob-bob-bob-bob"}[tenant]
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True, **more}
            return client.post("/v1/completions", json=body, headers=headers)

        both = complete("alice", n=2)
        assert (both.status_code, "open answers" in both.json()["error"]["message"]) == (429, True)
        assert complete("alice", max_tokens=10**6).status_code == 400  # a refused request is not counted
        assert [complete("alice").status_code for _ in range(3)] == [200, 200, 429]
        late = complete("alice")
        assert 1 <= int(late.headers["Retry-After"]) <= 30
        assert late.json()["error"]["type"] == "RateLimitError"
        assert [complete("bob").status_code for _ in range(5)] == [200] * 5
        headers = {"Authorization": "Bearer sk-alice-alice-alice"}
        used = client.get("/usage", headers=headers).json()
        assert (used["requests"], used["prompt_tokens"], used["completion_tokens"]) == (2, 10, 6)
        assert used["limits"]["requests_per_minute"] == 2
        written(path, ALICE, BOB)
        until(lambda: complete("alice").status_code == 200)
        written(path, BOB)
        until(lambda: complete("alice").status_code == 401)
        assert complete("bob").status_code == 200
