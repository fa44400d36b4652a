"""An engine that dies in various ways, under streams with known tokens: no client loses a token or gets one twice.

`make kill-campaign` runs `test_killed_at_random_instants` for as long as desired.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from lockstep.core.journal.reader import read_journal  # noqa: E402
from lockstep.core.journal.replay import replay  # noqa: E402
from tests.support.kills import ARGUMENTS, Asked, Outcome, Tally, ask, campaign, own_failures, serve_one, stored  # noqa: E402
from tests.support.live_server import RUN_SERVE, LiveServer, metric, running, serving, until  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

SLOW = ("--speed", "0.1", "--snapshot-s", "0.5")


class Clients:
    """Concurrent requests, and their results."""

    def __init__(self, server: LiveServer, asked: list[Asked]) -> None:
        self.tally = Tally()
        self._threads = [threading.Thread(target=serve_one, args=(server.url, one, self.tally)) for one in asked]
        for thread in self._threads:
            thread.start()

    def wait(self) -> Tally:
        """The results, when all requests have ended."""
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a stream did not end"
        return self.tally


def some(count: int, seed: int = 1, tokens: tuple[int, int] = (20, 60)) -> list[Asked]:
    """Requests of all kinds."""
    rng = random.Random(seed)
    return [ask(rng, f"{seed}-{number}", tokens) for number in range(count)]


def endless(count: int, seed: int = 1) -> list[Asked]:
    """Requests that do not end before the engine does."""
    rng = random.Random(seed)
    return [ask(rng, f"{seed}-{number}", (1500, 1500), ("greedy", "drawn")) for number in range(count)]


def lives(server: LiveServer) -> int:
    """Number of engine generations after the first."""
    return server.text().count(" s after the end of the previous generation")


def test_killed_at_random_instants(tmp_path: Path) -> None:
    seed, kills = random.SystemRandom().randrange(2**31), 12
    with serving(tmp_path / "log", *ARGUMENTS, *SLOW, "--restarts", "1000") as server:
        outcome = campaign(server, seed=seed, kills=kills)
    told = f"python -m tests.campaigns.kills --seed {seed} --kills {kills}\n{outcome.text()}\n{server.text()[-2000:]}"
    assert not outcome.tally.faults, told
    assert outcome.kills == kills, told
    assert outcome.tally.requests >= 32, told
    assert outcome.victims.keys() == {"engine"}
    assert 0 < outcome.serving <= kills, told


def test_the_parts_of_a_campaign_of_kills_are_added_up_in_its_file_of_results(tmp_path: Path) -> None:
    path, options = tmp_path / "results.json", ["pp=2"]
    for seed, victim in ((7, "engine"), (8, "rank 1 of engine"), (9, "engine")):
        part = Outcome(Counter({victim: 5}), 3, 1.5, Tally(requests=2, tokens=60), [0.5, 2.0], [seed])
        whole = stored(path, options).plus(part) if path.exists() else part
        whole.store(path, options)
    found = stored(path, options)
    assert found.victims == {"engine": 10, "rank 1 of engine": 5}
    assert (found.kills, found.serving, found.seconds, found.seeds) == (15, 9, 4.5, [7, 8, 9])
    assert (found.tally.requests, found.tally.tokens, max(found.back_s)) == (6, 180, 2.0)
    assert "0 lost, 0 doubled, 0 wrong" in found.text()
    found.tally.fault("lost", "one")
    found.store(path, options)
    assert "FAULTS: 1 lost" in stored(path, options).text()
    with pytest.raises(ValueError, match=r"options \['pp=2'\], not \['pp=1'\]"):
        stored(path, ["pp=1"])
    path.write_text("{}")
    with pytest.raises(ValueError, match="no results of a campaign"):
        stored(path, options)


def test_an_engine_that_ends_by_itself_is_found_among_those_that_were_killed() -> None:
    failed = "ERROR engine 1: EngineStopped: the engine failed: "
    own = failed + "RankLost: rank 1, stage 1 of 2 (process 9) failed with batches 2 to 3 in flight: ZeroDivisionError"
    killed = (
        "RankLost: rank 1 of 2 (process 9) was ended by SIGKILL (",
        "PeerRankLost: rank 0 of 2 ended: the connection",
    )
    assert own_failures("\n".join([failed + killed[0], own, "INFO engine 1: ready", failed + killed[1]])) == [own]


def test_a_session_goes_on_behind_a_kill_between_its_turns_and_within_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with serving(tmp_path / "log", *ARGUMENTS, *SLOW, "--journal", str(run)) as server:
        with httpx2.Client(base_url=server.url, timeout=120) as client:
            session = client.post("/open_session", json={"capacity_of_str_len": 4000}).json()

            def said(tokens: int, **asked: Any) -> dict[str, Any]:
                params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
                answer: dict[str, Any] = client.post("/generate", json={"sampling_params": params, **asked}).json()
                return answer

            def turn(text: str, tokens: int) -> dict[str, Any]:
                return said(tokens, text=text, session_params={"id": session})

            def kill() -> None:
                os.kill(server.children()["engine"], signal.SIGKILL)

            first = turn("hello", 4)
            kill()
            until(lambda: lives(server) == 1)
            later = threading.Timer(0.4, kill)
            later.start()
            second = turn(" again", 60)
            later.join()
            until(lambda: lives(server) == 2)
            third = turn(" and", 4)
            prompts = [one["meta_info"]["prompt_tokens"] for one in (first, second, third)]
            assert prompts == [5, 5 + 4 + 6, 15 + 60 + 4]
            whole = [*b"hello", *first["output_ids"], *b" again", *second["output_ids"], *b" and"]
            assert second["output_ids"] == said(60, input_ids=whole[:15])["output_ids"]
            assert third["output_ids"] == said(4, input_ids=whole)["output_ids"]
            assert client.post("/close_session", json={"session_id": session}).status_code == 200
        assert server.end() == 0
    assert replay(run).digest


@pytest.mark.parametrize("written", ["5:3", "9:3:BatchFinished", "19:3:BatchFinished"])
def test_killed_between_journal_and_stream(written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens written and not sent are sent by the next generation, which is killed at the same place."""
    monkeypatch.setenv("LOCKSTEP_FAULT", f"written:{written}")
    with serving(tmp_path / "log", *ARGUMENTS, *SLOW) as server:
        tally = Clients(server, some(8, tokens=(60, 90))).wait()
        assert not tally.faults, tally.first
        assert tally.requests == 8
        assert lives(server) == 3


def test_killed_again_while_it_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", "recovered")
    with serving(tmp_path / "log", *ARGUMENTS, *SLOW) as server:
        clients = Clients(server, some(8))
        until(lambda: clients.tally.requests > 0 or clients.tally.heard_s > 0)
        os.kill(server.children()["engine"], signal.SIGKILL)
        tally = clients.wait()
        assert not tally.faults, tally.first
        assert server.text().count("the engine ended with signal SIGKILL") == 2
        assert lives(server) == 1
        until(lambda: metric(server, "lockstep_engine_restarts_total") == 2)


def test_a_torn_tail_is_cut_off_and_computed_again(tmp_path: Path) -> None:
    """The last record is damaged before the next generation reads it. Its tokens are drawn again, and sent once."""
    with serving(tmp_path / "log", *ARGUMENTS, *SLOW, "--journal", str(tmp_path / "run")) as server:
        clients = Clients(server, some(8, tokens=(60, 90)))
        until(lambda: clients.tally.heard_s > 0)
        time.sleep(0.3)
        fork_server = server.children()["fork_server"]
        os.kill(fork_server, signal.SIGSTOP)  # it cannot fork before the tail is torn
        os.kill(server.children()["engine"], signal.SIGKILL)
        until(lambda: "engine" not in server.children())
        newest = max((tmp_path / "run" / "journal").glob("*.log"))
        size = newest.stat().st_size
        os.truncate(newest, size - 5)
        os.kill(fork_server, signal.SIGCONT)
        tally = clients.wait()
        assert not tally.faults, tally.first
        assert lives(server) == 1
        assert newest.stat().st_size < size - 5
    assert replay(tmp_path / "run").tail is not None


def test_an_engine_without_progress_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", "hang:9")
    with serving(tmp_path / "log", *ARGUMENTS, *SLOW, "--batch-timeout-s", "5") as server:
        tally = Clients(server, some(8)).wait()
        assert not tally.faults, tally.first
        assert "the engine made no progress" in server.text()


def test_an_engine_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *ARGUMENTS, *SLOW, "--batch-timeout-s", "5") as server:
        clients = Clients(server, some(8, tokens=(60, 90)))
        until(lambda: clients.tally.heard_s > 0)
        os.kill(server.children()["engine"], signal.SIGSTOP)
        later = Clients(server, some(2, seed=2))  # new work, even if all tokens had been sent
        tally = clients.wait()
        assert not tally.faults, tally.first
        assert not later.wait().faults, later.tally.first
        assert "the engine made no progress for 5 s" in server.text()


def test_a_fork_server_that_dies_is_replaced_with_its_engine(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *ARGUMENTS, *SLOW) as server:
        clients = Clients(server, some(8, tokens=(60, 90)))
        until(lambda: clients.tally.heard_s > 0)
        engine = server.children()["engine"]
        os.kill(server.children()["fork_server"], signal.SIGKILL)
        tally = clients.wait()
        assert not tally.faults, tally.first
        assert not Path(f"/proc/{engine}").exists() or " Z " in Path(f"/proc/{engine}/stat").read_text()


def test_a_worker_that_dies_with_the_engine_takes_its_own_streams_only(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *ARGUMENTS, *SLOW, "--api-workers", "2") as server:
        until(lambda: server.text().count(": ready: ") == 2)
        children = server.children()

        def accepted_by(worker: str, other: str, asked: list[Asked]) -> Clients:
            """Send requests while the other worker is stopped, so that this one accepts all of them."""
            os.kill(children[other], signal.SIGSTOP)
            try:
                clients = Clients(server, asked)
                until(lambda: clients.tally.streams_begun == len(asked))
            finally:
                os.kill(children[other], signal.SIGCONT)
            return clients

        lost = accepted_by("worker 0", "worker 1", endless(8))
        kept = accepted_by("worker 1", "worker 0", some(8, tokens=(150, 200)))
        assert not kept.tally.requests + sum(kept.tally.faults.values()), "they must run when the engine is killed"
        os.kill(children["worker 0"], signal.SIGKILL)
        os.kill(children["engine"], signal.SIGKILL)
        assert lost.wait().faults == {"broken": 8}, lost.tally.first
        assert not kept.wait().faults, kept.tally.first
        assert kept.tally.requests == 8
        until(lambda: running(server) == 0)
        assert not Clients(server, some(4, seed=3)).wait().faults


def post(server: LiveServer, **body: Any) -> Any:
    """A request that is not streamed."""
    return httpx2.post(f"{server.url}/v1/completions", json={"temperature": 0, **body}, timeout=120)


@pytest.mark.parametrize(("fault", "deaths"), [("poison", 2), ("arrival", 2), ("greedy", 6)])
def test_a_request_that_kills_the_engine_again_fails_alone(
    fault: str, deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Concurrent requests lose nothing, and are not suspected afterwards."""
    poison = 31337
    monkeypatch.setenv("LOCKSTEP_FAULT", f"{fault}:{poison}")
    with serving(tmp_path / "log", *ARGUMENTS, *SLOW) as server:
        clients = Clients(server, some(8, tokens=(60, 90)))
        until(lambda: clients.tally.heard_s > 0)
        answer = post(server, prompt=[poison, 1, 2], max_tokens=5)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")
        assert "ended more than once" in answer.json()["error"]["message"]
        tally = clients.wait()
        assert not tally.faults, tally.first
        assert 2 <= lives(server) <= deaths
        assert post(server, prompt="and on", max_tokens=3).status_code == 200
        assert server.status_of("/health") == server.status_of("/ready") == 200


def test_too_many_restarts_end_the_server_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", "written:6:99")
    with serving(tmp_path / "log", *ARGUMENTS, *SLOW, "--restarts", "2") as server:
        tally = Clients(server, some(4, tokens=(60, 90))).wait()
        assert server.process.wait(120) == 1
    assert sum(tally.faults.values()) == 4
    assert set(tally.faults) <= {"error", "refused"}  # late requests are answered 503
    assert "signal SIGKILL, and 2 restarts in 300 s are the limit" in tally.first[0]


def test_a_file_that_cannot_grow_costs_no_stream(tmp_path: Path) -> None:
    """The engine ends, the next one writes to a new file, and every stream continues. See test_full_disk.py, too."""
    kept = ("--journal", str(tmp_path / "run"), "--restarts", "2")

    def fill(*pids: int) -> None:
        newest = max((tmp_path / "run" / "journal").glob("*.log"))
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (newest.stat().st_size + 100,) * 2)

    with serving(tmp_path / "log", *ARGUMENTS, *SLOW, *kept) as server:
        clients = Clients(server, some(8, tokens=(60, 90)))
        until(lambda: clients.tally.heard_s > 0)
        fill(server.children()["engine"])
        later = Clients(server, some(2, seed=5))  # new records, even if all tokens had been sent
        tally = clients.wait()
        assert not tally.faults, tally.first
        assert not later.wait().faults, later.tally.first
        assert (lives(server), server.text().count("engine failed: JournalError: cannot write")) == (1, 1)
    with serving(tmp_path / "log2", *ARGUMENTS, *SLOW, *kept) as server:
        assert not Clients(server, some(4, seed=3)).wait().faults
    assert replay(tmp_path / "run").digest


def test_without_content_open_requests_fail_and_the_server_continues(tmp_path: Path) -> None:
    secret = "nobody must find this text"
    kept = ("--journal", str(tmp_path / "run"), "--journal-content", "digests")
    with serving(tmp_path / "log", *ARGUMENTS, *SLOW, *kept) as server:
        clients = Clients(server, endless(3))
        until(lambda: running(server) == 3 and clients.tally.heard_s > 0)
        os.kill(server.children()["engine"], signal.SIGKILL)
        tally = clients.wait()
        assert sum(tally.faults.values()) == 3, tally.faults  # requests without any token are answered 503
        assert set(tally.faults) <= {"error", "refused"}, tally.first
        assert tally.faults["error"], tally.first
        assert "only digests were stored of its work" in tally.first[0]
        assert post(server, prompt=secret, max_tokens=3, stop=["never"]).status_code == 200
    data = b"".join(path.read_bytes() for path in (tmp_path / "run" / "journal").iterdir())
    assert secret.encode("utf-32-le") not in data  # as token ids
    assert read_journal(tmp_path / "run").header.content == "digests"
    assert not list((tmp_path / "run" / "journal").glob("snapshot-*"))


def test_a_server_goes_on_with_the_journal_of_the_one_before(tmp_path: Path) -> None:
    """The clients have left: their requests are cancelled. The whole journal replays."""
    kept = ("--journal", str(tmp_path / "run"))
    with serving(tmp_path / "log", *ARGUMENTS, *SLOW, *kept) as server:
        clients = Clients(server, endless(4))
        until(lambda: clients.tally.heard_s > 0)
        server.process.kill()
        clients.wait()
        until(lambda: not _locked(tmp_path / "run"))
    with serving(tmp_path / "log2", *ARGUMENTS, *SLOW, *kept) as server:
        tally = Clients(server, some(4, seed=2)).wait()
        assert not tally.faults, tally.first
        assert re.search(r"recovered (\d+) requests .*; \1 of them were not submitted again", server.text()), (
            server.text()
        )
    assert replay(tmp_path / "run").tail is not None
    other = subprocess.run(
        [*RUN_SERVE, *ARGUMENTS, *SLOW, *kept, "--set", "page_size=32"], capture_output=True, text=True, timeout=120
    )
    assert (other.returncode, other.stdout) == (1, "")  # it never served
    assert "starting: http://" in other.stderr
    assert "was begun with other settings: `page_size` 32 (was " in other.stderr


def _locked(run: Path) -> bool:
    folder = os.open(run / "journal", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(folder)
    return False
