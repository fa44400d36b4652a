"""Several engines behind a router: assignment of requests, operator's requests, and an engine that dies.

Decisions of a live server's router are in its journal, and are repeated by `lockstep.core.cluster.router`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
openai = pytest.importorskip("openai", reason="the official client is not installed")
zmq = pytest.importorskip("zmq", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from click.testing import CliRunner  # noqa: E402

from lockstep.api.processes.routing import RouterService, RouterThread  # noqa: E402
from lockstep.api.processes.sockets import fresh_folder, router_address, writer  # noqa: E402
from lockstep.api.processes.wire import (  # noqa: E402
    Drained,
    EngineHere,
    EngineLost,
    InputBlocked,
    InputReleased,
    Offer,
    OfferClosed,
    Routed,
    SessionOver,
    Withdraw,
    WorkerLost,
)
from lockstep.api.serve import serve  # noqa: E402
from lockstep.api.settings import read_settings  # noqa: E402
from lockstep.api.worker import SHARED_S  # noqa: E402
from lockstep.core.cluster.dispatch import DispatchConfig  # noqa: E402
from lockstep.core.cluster.router import (  # noqa: E402
    ROUTER_POLICIES,
    EngineChanged,
    RequestOffered,
    RouterConfig,
    RouterPolicy,
)
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.journal.reader import read_journal  # noqa: E402
from lockstep.host.router_check import compare_with_engines, verify_router  # noqa: E402
from lockstep.host.router_journal import label_key, left_in_queue, session_key  # noqa: E402
from lockstep.tools.diff import diff  # noqa: E402
from lockstep.tools.explain import explain  # noqa: E402
from lockstep.tools.journal import journal  # noqa: E402
from lockstep.tools.replay import replay  # noqa: E402
from tests.api.test_control import ALICE, KEYS, OPERATOR  # noqa: E402
from tests.support import kills  # noqa: E402
from tests.support.browser import dom_of, needs_chromium  # noqa: E402
from tests.support.kills import ARGUMENTS, Tally, ask, campaign, serve_one  # noqa: E402
from tests.support.live_server import EMULATED, LiveServer, ask_operator, serving, until  # noqa: E402
from tests.support.routed import facts, raw  # noqa: E402

TWO = ("--dp", "2")


def routed(run: Path) -> list[int | None]:
    """The engine of each request."""
    return [record.routed.engine for record in facts(run) if record.routed is not None]


def per_engine(server: LiveServer, name: str) -> list[float]:
    """A figure of both engines."""
    return [metric_of(server, name, engine) for engine in (0, 1)]


def metric_of(server: LiveServer, name: str, engine: int) -> float:
    lines = httpx2.get(f"{server.url}/metrics", headers=USER, timeout=120).text.splitlines()
    wanted = [line for line in lines if line.startswith(f"{name}{{") and f'engine="{engine}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in wanted)


def client_of(server: LiveServer, key: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=120)


# ----------------------------------------------------------------------------------------------------- the dispatcher


class Board:
    """A dispatcher with two running engines and a clock that does not advance."""

    def __init__(self, policy: RouterPolicy = "round_robin", run: Path | None = None, **more: Any) -> None:
        self.answers: list[Routed] = []
        config = RouterConfig(policy=policy)
        self.dispatcher = RouterService(2, config, self.answers.append, run=run, clock_us=lambda: 0, **more)
        self.number = -1

    def both(self) -> Board:
        for engine in (0, 1):
            self.tell(EngineHere(engine, 0, 1000, (), False))
        return self

    def tell(self, *messages: Any) -> None:
        for message in messages:
            self.dispatcher.handle(message)

    def offer(self, worker: int = 0, **more: Any) -> int | None:
        """The engine that takes another request; None if none does yet."""
        self.number += 1
        before = len(self.answers)
        self.tell(Offer(worker, self.number, 10, **more))
        return self.answers[-1].engine if len(self.answers) > before else None


def test_offers_wait_until_every_engine_was_there_and_again_while_none_is() -> None:
    board = Board()
    board.tell(EngineHere(0, 0, 1000, (), False))
    assert board.offer() is None
    board.tell(EngineHere(1, 0, 1000, (), False))
    assert board.answers == [Routed(0, 0, 0, True)]
    board.tell(EngineLost(0, 1))
    assert [board.offer() for _ in range(2)] == [1, 1]
    board.tell(EngineHere(0, 0, 1000, (), False))  # of the generation that has ended
    assert board.offer() == 1
    board.tell(EngineLost(1, 1))
    assert board.offer() is None
    board.tell(EngineHere(0, 1, 1000, (), False))
    assert board.answers[-1].engine == 0
    assert board.dispatcher.router is not None
    assert board.dispatcher.router.open_requests == [2, 3]  # earlier requests continue, and still count
    board.tell(EngineLost(1, None))
    assert board.dispatcher.router.open_requests == [2, 0]
    assert [board.offer() for _ in range(2)] == [0, 0]


def test_open_requests_of_a_worker_end_with_it() -> None:
    board = Board("least_requests").both()
    assert [board.offer(worker=worker) for worker in (0, 1, 0, 1)] == [0, 1, 0, 1]
    board.tell(OfferClosed(0, 0, 5))
    assert board.dispatcher.router is not None
    assert board.dispatcher.router.open_requests == [1, 2]
    board.tell(WorkerLost(1))
    assert board.dispatcher.router.open_requests == [1, 0]


def test_a_session_stays_on_its_engine_under_any_policy() -> None:
    board = Board("round_robin").both()
    mine, fork = session_key("mine"), session_key("fork")
    home = board.offer(session=mine, purpose="open")
    assert [board.offer(session=mine) for _ in range(3)] == [home] * 3
    assert board.offer(session=fork, purpose="open", parent=mine) == home
    assert not board.answers[-1].fresh or board.answers[-1].engine == home
    board.tell(EngineLost(home or 0, 1))
    assert board.offer(session=mine) == home  # the engine keeps the session until it is back
    board.tell(EngineHere(home or 0, 1, 1000, (mine,), False))
    assert board.offer(session=mine) == home
    assert board.offer(session=fork, purpose="close") == 0  # fresh: no such session
    assert board.answers[-1].fresh
    board.tell(SessionOver(mine))
    assert {board.offer(session=mine) for _ in range(2)} == {0, 1}


def test_a_request_runs_on_the_engine_that_its_client_names_and_waits_for_it() -> None:
    board = Board().both()
    for _ in range(3):
        board.offer(named=1)
    assert [one.engine for one in board.answers] == [1, 1, 1]
    board.tell(EngineLost(1, 1))
    assert board.offer(named=1) is None, "the engine restarts, and the request waits for it"
    board.tell(EngineHere(1, 1, 1000, (), False))
    assert (board.answers[-1].number, board.answers[-1].engine) == (board.number, 1)
    board.tell(Drained(1, True))
    assert board.offer(named=1) == 1, "a draining engine refuses at once"
    assert board.offer(named=0) == 0


def test_a_request_of_a_named_engine_that_has_ended_is_refused() -> None:
    board = Board().both()
    board.tell(EngineLost(1, 1))
    assert board.offer(named=1) is None
    board.tell(EngineLost(1, None))
    assert board.answers == [Routed(0, board.number, -1, refused="draining")]
    assert board.offer(named=1) == -1


@pytest.mark.parametrize("admission", [None, DispatchConfig(open_max=4)], ids=["direct", "queue"])
def test_while_input_is_blocked_requests_wait_in_their_order(admission: DispatchConfig | None) -> None:
    board = Board(admission=admission).both()
    board.tell(InputBlocked(0, 100), InputBlocked(3, 7))
    assert [board.offer() for _ in range(3)] == [None] * 3
    board.tell(OfferClosed(0, 1, 0))  # its client leaves
    board.tell(InputReleased(0, 100))
    assert board.answers == [], "another worker still changes weights"
    board.tell(EngineLost(1, 1), EngineHere(1, 1, 1000, (), False))
    assert board.answers == []
    board.tell(InputReleased(3, 7))
    assert [one.number for one in board.answers] == [0, 2]
    assert board.offer() is not None


def test_a_block_ends_with_its_worker() -> None:
    board = Board().both()
    board.tell(InputBlocked(3, 7))
    assert board.offer() is None
    board.tell(WorkerLost(3))
    assert [one.number for one in board.answers] == [board.number]


def test_when_all_engines_drain_one_of_them_refuses() -> None:
    board = Board().both()
    board.tell(Drained(1, True))
    assert [board.offer() for _ in range(2)] == [0, 0]
    board.tell(Drained(0, True))
    assert board.offer() == 0  # and is refused there
    board.tell(Drained(0, False), Drained(1, False))
    assert {board.offer() for _ in range(2)} == {0, 1}


@pytest.mark.parametrize("policy", ROUTER_POLICIES)
def test_messages_in_any_order_are_counted_and_replayed(policy: RouterPolicy, tmp_path: Path) -> None:
    """Requests, ends, sessions, engines and workers in random order: nothing is lost, and nothing is left over."""
    rng = random.Random(policy)
    board = Board(policy, run=tmp_path).both()
    lives, up, offered, ended = [0, 0], {0, 1}, set[tuple[int, int]](), set[tuple[int, int]]()
    for _ in range(600):
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                worker = rng.randrange(2)
                prefix = tuple(range(rng.randrange(4)))
                engine = board.offer(worker, prefix=prefix, session=rng.choice(("", "a", "b")))
                assert (engine in up) if up else engine is None
                offered.add((worker, board.number))
            case 4 | 5 if offered - ended:
                one = rng.choice(sorted(offered - ended))
                board.tell(OfferClosed(*one, rng.randrange(50)))
                ended.add(one)
            case 6:
                engine = rng.randrange(2)
                if engine in up:
                    lives[engine] += 1
                    board.tell(EngineLost(engine, lives[engine]))
                    up.remove(engine)
                else:
                    board.tell(EngineHere(engine, lives[engine], 1000, (), False))
                    up.add(engine)
            case 7 if rng.random() < 0.1:
                board.tell(WorkerLost(1))
                ended |= {one for one in offered if one[0] == 1}
    for engine in {0, 1} - up:
        board.tell(EngineHere(engine, lives[engine], 1000, (), False))
    assert board.dispatcher.router is not None
    assert sum(board.dispatcher.router.open_requests) == len(offered - ended)
    answered = Counter((answer.worker, answer.number) for answer in board.answers)
    assert set(answered.values()) == {1}
    assert offered - ended <= set(answered)
    board.dispatcher.close()
    assert verify_router(tmp_path)[1] >= len(answered)


# ------------------------------------------------------------------------------------------- a queue before the router


def line_of(run: Path | None = None, **more: Any) -> Board:
    admission = DispatchConfig(**{"open_max": 1, **more})
    return Board("least_requests", run=run, admission=admission).both()


def refused(board: Board) -> list[tuple[int, str]]:
    return [(answer.number, answer.refused) for answer in board.answers if answer.engine < 0]


def test_beyond_the_limit_requests_wait_each_tenant_in_turn_and_the_highest_priority_first() -> None:
    board = line_of(order="priority", tenant_weights={"small": 0.5})
    assert [board.offer(tenant="flood") for _ in range(5)] == [0, 1, None, None, None]
    assert board.offer(worker=1, tenant="polite") is None
    assert board.offer(tenant="flood", priority=3) is None
    for over in ((0, 0), (0, 1), (1, 5), (0, 6)):
        board.tell(OfferClosed(*over, 4))
    assert [(one.worker, one.number) for one in board.answers[2:]] == [(1, 5), (0, 6), (0, 2), (0, 3)]
    assert board.dispatcher.queue is not None
    assert board.dispatcher.queue.waiting == 1


def test_a_full_queue_refuses_and_withdrawn_requests_leave_it() -> None:
    board = line_of(waiting_max=2)
    assert [board.offer(label="mine") for _ in range(4)] == [0, 1, None, None]
    assert board.offer(worker=1, label="other") == -1
    assert refused(board) == [(4, "queue_full")]
    board.tell(Withdraw("mine"))
    assert refused(board)[1:] == [(2, "cancelled"), (3, "cancelled")]
    assert board.dispatcher.router is not None
    assert board.dispatcher.router.open_requests == [1, 1]  # requests of an engine are ended by the engine
    assert board.offer() is None
    board.tell(WorkerLost(0))
    assert board.dispatcher.router.open_requests == [0, 0]
    assert board.dispatcher.queue is not None
    assert board.dispatcher.queue.waiting == 0


def test_a_request_that_ends_in_the_queue_is_in_the_journal_under_the_key_of_its_label(tmp_path: Path) -> None:
    board = line_of(tmp_path, waiting_max=2)
    keys = [label_key(name, "a") for name in ("one", "two", "three", "four", "five")]
    for key in keys:
        board.offer(tenant="a", label=key)
    board.tell(Withdraw(keys[2]))
    board.dispatcher.close()
    left = left_in_queue(tmp_path)
    assert [(one.label, one.tenant, one.reason) for one in left] == [
        (keys[4], "a", "line_full"),
        (keys[2], "a", "cancelled"),
    ]
    assert b"three" not in raw(tmp_path)


def test_when_all_engines_drain_no_request_waits() -> None:
    board = line_of()
    assert [board.offer() for _ in range(3)] == [0, 1, None]
    board.tell(Drained(0, True))
    assert len(board.answers) == 2
    board.tell(Drained(1, True))
    assert board.answers[2:] == [Routed(0, 2, 0)]  # engine 0 answers that it drains
    assert board.offer() == 0
    board.tell(OfferClosed(0, 0, 1), OfferClosed(0, 1, 1), Drained(0, False))
    assert [board.offer() for _ in range(2)] == [0, None]


def test_requests_of_an_engine_that_ended_for_good_are_not_sent_again() -> None:
    board = line_of()
    assert [board.offer() for _ in range(4)] == [0, 1, None, None]
    board.tell(EngineLost(1, None))
    assert board.dispatcher.router is not None
    assert board.dispatcher.router.open_requests == [1, 0]
    board.tell(OfferClosed(0, 1, 0), OfferClosed(0, 0, 3))  # an end from the worker, and another end
    assert [(one.number, one.engine) for one in board.answers[2:]] == [(2, 0)]


def test_a_session_that_is_opened_waits_as_others_do() -> None:
    board = line_of()
    mine = session_key("mine")
    assert [board.offer() for _ in range(2)] == [0, 1]
    assert board.offer(session=mine, purpose="open") is None
    board.tell(OfferClosed(0, 1, 1))
    assert board.answers[-1] == Routed(0, 2, 1, True)
    assert board.offer(session=mine) == 1
    assert board.offer(session=mine) is None  # other engines are full as well
    board.tell(OfferClosed(0, 0, 1))
    assert board.answers[-1].engine == 1


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_with_a_waiting_queue_everything_is_answered_once_and_replayed(order: str, tmp_path: Path) -> None:
    """Random order with waiting tenants, full queues, and new journal files."""
    rng = random.Random(order)
    admission = DispatchConfig(open_max=2, waiting_max=5, order=order, tenant_weights={"a": 2.0})  # type: ignore[arg-type]
    board = Board("prefix_affinity", run=tmp_path, admission=admission, bytes_max=16 * 20_000).both()
    lives, up, offered, ended = [0, 0], {0, 1}, set[tuple[int, int]](), set[tuple[int, int]]()
    for _ in range(800):
        match rng.randrange(9):
            case 0 | 1 | 2 | 3 | 4:
                more = {"tenant": rng.choice("abc"), "priority": rng.choice((None, 1, 2)), "label": rng.choice("xyz")}
                worker = rng.randrange(2)
                board.offer(worker, prefix=tuple(range(rng.randrange(4))), session=rng.choice(("", "s")), **more)
                offered.add((worker, board.number))
            case 5 | 6 if offered - ended:
                one = rng.choice(sorted(offered - ended))
                board.tell(OfferClosed(*one, rng.randrange(50)))
                ended.add(one)
            case 7:
                engine = rng.randrange(2)
                if engine in up:
                    lives[engine] += 1
                    board.tell(EngineLost(engine, lives[engine]))
                    up.remove(engine)
                else:
                    board.tell(EngineHere(engine, lives[engine], 1000, (), False))
                    up.add(engine)
            case 8 if rng.random() < 0.2:
                if rng.random() < 0.5:
                    board.tell(Withdraw(rng.choice("xyz")))
                else:
                    board.tell(WorkerLost(1))
                    ended |= {one for one in offered if one[0] == 1}
        ended |= {(answer.worker, answer.number) for answer in board.answers if answer.engine < 0}
    for engine in {0, 1} - up:
        board.tell(EngineHere(engine, lives[engine], 1000, (), False))
    while told := {(answer.worker, answer.number) for answer in board.answers} & offered - ended:
        board.tell(*(OfferClosed(*one, 1) for one in sorted(told)))
        ended |= told
    assert offered == ended
    answered = Counter((answer.worker, answer.number) for answer in board.answers)
    assert set(answered.values()) == {1}
    assert board.dispatcher.router is not None
    assert board.dispatcher.router.open_requests == [0, 0]
    assert board.dispatcher.queue is not None
    assert board.dispatcher.queue.waiting == 0
    assert refused(board)
    board.dispatcher.close()
    assert len(list(tmp_path.glob("router/*.log"))) > 1
    assert verify_router(tmp_path)[1] >= len(answered)


def test_a_router_reports_an_unreadable_message() -> None:
    folder, failed = fresh_folder(), list[Exception]()
    try:
        thread = RouterThread(folder, lambda answer: RouterService(2, RouterConfig(), answer), failed.append)
        context: zmq.Context[Any] = zmq.Context()
        to_router = writer(context, router_address(folder))
        to_router.send(b"nonsense")
        until(lambda: failed)
        assert "the router got 8 bytes that are not a message" in str(failed[0])
        to_router.close()
        context.term()
        thread.join(120)
    finally:
        shutil.rmtree(folder)


def test_a_journal_that_is_large_is_begun_anew_with_what_is_open(tmp_path: Path) -> None:
    board = Board("least_requests", run=tmp_path, bytes_max=16 * 2000).both()
    board.offer()
    for number in range(1, 40):
        board.offer()
        board.tell(OfferClosed(0, number, 1))
    board.dispatcher.close()
    assert board.dispatcher.router is not None
    assert sum(board.dispatcher.router.open_requests) == 1
    assert 2 <= len(list(tmp_path.glob("router/*.log"))) <= 10
    assert verify_router(tmp_path)[1] >= 40


# ------------------------------------------------------------------------------------------------------------ settings


RANKS: dict[str, Any] = {"tp": 2, "attention_dp": 2, "rank_schedulers": True}


def test_each_data_parallel_rank_is_an_engine_with_one_gpu() -> None:
    settings = read_settings(None, {**RANKS, "router": "total_tokens", "set": {"prefill_delayer": True}})
    assert (settings.engines, [settings.gpus_of(engine) for engine in range(2)]) == (2, [1, 1])
    settings = read_settings(None, {**RANKS, "prefill_engines": 1, "decode_engines": 2})
    assert settings.engines == 6
    assert [settings.role_of(engine) for engine in range(6)] == ["prefill"] * 2 + ["decode"] * 4
    assert [settings.gpus_of(engine) for engine in range(6)] == [1] * 6


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dp": 0}, "`dp` must be at least 1, got `0`"),
        ({"dp": 1000}, "`dp` must be at most 256, got `1000`"),
        ({"router": "round_robin"}, "`router` is for several engines\nhint: give dp, or drop it"),
        ({"dp": 2, "router": "random"}, "Invalid enum value 'random'"),
        ({"dp": 2, "router_load_bound": 0.5}, "`router_load_bound` must be from 1 to 1000, got `0.5`"),
        ({"admission": "open=4"}, "`admission` is for several engines\nhint: give dp, or drop it"),
        ({"dp": 2, "admission": "waiting=4"}, "`admission` has no limit, got `waiting=4`"),
        ({"dp": 2, "admission": "open=4,share.a=2"}, "`admission` has shares, but without api_keys there are no"),
        (
            {
                "dp": 2,
                "admission": "open=4,order=priority",
                "set": {"schedule_policy": "priority", "schedule_low_priority_values_first": True},
            },
            "`admission` has order=priority, the highest first, but `schedule_low_priority_values_first` is true",
        ),
        ({"dp": 2, "router_block_tokens": 0}, "`router_block_tokens` must be a whole number of at least 1, got `0`"),
        ({**RANKS, "dp": 2}, "`dp` is 2, but `attention_dp` is 2: a server has one engine of data-parallel ranks"),
        (
            {**RANKS, "prefill_engines": 1, "decode_engines": 1, "decode_tp": 1},
            "`attention_dp` is 2 and `tp` is 1: each rank has the attention of one GPU",
        ),
        ({**RANKS, "emulate": "qwen3-8b@h200"}, "`attention_dp` is for a model"),
        ({**RANKS, "lora": {"a": "folder"}}, "`lora` is .*, but `attention_dp` is 2: MLPs compute the rows"),
        ({**RANKS, "tp": 4}, "each rank has the attention of one GPU\nhint: --tp 2"),
        ({"set": {"prefill_delayer": True}}, "`prefill_delayer` is of data-parallel ranks, and the engine has one"),
    ],
)
def test_impossible_settings_are_one_clear_error(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_settings(None, given)


def test_each_engine_writes_into_a_folder_of_its_own(tmp_path: Path) -> None:
    settings = read_settings(None, {"dp": 2, "journal": "run", "profile_dir": str(tmp_path)})
    one = settings.of_engine(1)
    assert (one.journal, one.profile_dir) == ("run/engines/1", f"{tmp_path}/engines/1")
    assert msgspec.structs.replace(one, journal="run", profile_dir=str(tmp_path)) == settings


def test_dry_run_prints_the_number_of_engines_and_a_journal_of_another_number_is_refused(tmp_path: Path) -> None:
    shown = CliRunner().invoke(serve, [*EMULATED, "--dp", "4", "--router", "prefix_affinity", "--dry-run"])
    assert "on 1 x H200-SXM, emulated, 4 times" in shown.output
    assert "memory of each engine" in shown.output
    assert "processes  4 engines, 1 API worker" in shown.output
    assert "router     prefix_affinity" in shown.output
    (tmp_path / "engines" / "0" / "journal").mkdir(parents=True)
    for dp in ("1", "2"):
        refused = CliRunner().invoke(serve, [*EMULATED, "--dp", dp, "--journal", str(tmp_path), "--dry-run"])
        assert "holds a run of 1 engine, and `dp` is" in str(refused.exception)


# ----------------------------------------------------------------------------------------------------- a live server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("dp")
    (folder / "keys.toml").write_text(KEYS)
    access = ("--api-keys", str(folder / "keys.toml"), "--admin-socket", str(folder / "admin"))
    policy = ("--router", "session_sticky", "--journal", str(folder / "run"), "--api-workers", "2")
    with serving(folder / "log", *EMULATED, *TWO, *access, *policy) as made:
        until(lambda: made.text().count(": ready: ") == 4)  # both workers are connected to both engines
        yield made


@pytest.fixture
def clean(server: LiveServer) -> Iterator[LiveServer]:
    """The server without open requests."""
    yield server
    until(lambda: httpx2.get(f"{server.url}/load", headers=USER, timeout=120).json()["server_load"] == 0)


USER = {"Authorization": f"Bearer {ALICE}"}


def operator(server: LiveServer, path: str, body: Any = None) -> tuple[int, Any]:
    return ask_operator(server.log.parent / "admin", path, OPERATOR, body)


def states(server: LiveServer) -> list[Any]:
    return [row["state"] for row in operator(server, "/get_server_info")[1]["engines"]]


def test_the_official_client_gets_the_answers_of_one_engine_and_stays_with_its_engine(clean: LiveServer) -> None:
    """Both workers answer through the same router: requests of a session have the same engine."""
    before = len(routed(clean.log.parent / "run"))
    said: list[str] = []
    for number in range(12):
        with client_of(clean, ALICE) as client:  # another connection, possibly to another worker
            header = {"X-Session-Id": f"s{number % 3}"}
            answer = client.completions.create(
                model="qwen3-0.6b", prompt="what?", max_tokens=4, temperature=0, extra_headers=header
            )
            said.append(answer.choices[0].text)
            stream = client.chat.completions.create(
                model="qwen3-0.6b",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=3,
                stream=True,
                extra_headers=header,
                extra_body={"ignore_eos": True},
            )
            assert sum(bool(chunk.choices[0].delta.content) for chunk in stream) >= 1
    assert len(set(said)) == 1
    homes = routed(clean.log.parent / "run")[before:]
    assert [homes[at : at + 2] for at in range(0, 24, 2)] == [[homes[6 * 0 + 2 * (at % 3)]] * 2 for at in range(12)]
    assert set(homes) == {0, 1}
    assert verify_router(clean.log.parent / "run")[1] >= 24
    assert compare_with_engines(clean.log.parent / "run") == []


IN_A_CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
DIALECTS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": IN_A_CHAT,
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": IN_A_CHAT,
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
}


@pytest.mark.parametrize("path", DIALECTS)
def test_every_dialect_sends_priority_routing_key_and_engine(clean: LiveServer, path: str) -> None:
    run, before = clean.log.parent / "run", len(routed(clean.log.parent / "run"))
    number = list(DIALECTS).index(path)
    with httpx2.Client(base_url=clean.url, headers=USER, timeout=120) as alice:
        for engine in (0, 0, 1, 1):
            more = {"data_parallel_rank": engine, "priority": -5 - number, "routing_key": f"key-{number}"}
            answer = alice.post(path, json=DIALECTS[path] | more)
            assert (answer.status_code, answer.headers.get("X-Ignored-Fields")) == (200, None)
        header = alice.post(path, json=DIALECTS[path], headers={"X-data-parallel-rank": "1"})
        assert header.status_code == 200
        wrong = alice.post(path, json=DIALECTS[path] | {"data_parallel_rank": 2})
        assert wrong.status_code == 400
        assert "`data_parallel_rank` is 2, but this server has engine 0 to 1" in wrong.json()["error"]["message"]
        assert alice.post(path, json=DIALECTS[path], headers={"X-data-parallel-rank": "-1"}).status_code == 400
    assert routed(run)[before:] == [0, 0, 1, 1, 1]
    for engine, count in ((0, 2), (1, 2)):
        arrived = [record.event for record in read_journal(run / "engines" / str(engine) / "journal").events()]
        mine = [one for one in arrived if getattr(one, "priority", None) == -5 - number]
        assert [one.routing_key.rpartition("/")[2] for one in mine] == [f"key-{number}"] * count


def test_no_engine_takes_a_request_while_another_still_changes_its_weights(clean: LiveServer) -> None:
    """A stream delays the new weights of engine 1; a request of engine 0, which has them at once, waits as well."""
    began, ended = threading.Event(), list[float]()

    def read_stream() -> None:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True, "data_parallel_rank": 1}
        with httpx2.stream("POST", f"{clean.url}/v1/completions", json=body, headers=USER, timeout=120) as stream:
            for _ in stream.iter_lines():
                began.set()
        ended.append(time.monotonic())

    def update() -> None:
        done.append(operator(clean, "/update_weights_from_disk", {"model_path": "another"}))

    done: list[Any] = []
    threads = [threading.Thread(target=read_stream), threading.Thread(target=update)]
    threads[0].start()
    assert began.wait(60)
    threads[1].start()
    until(lambda: states(clean)[0]["weights_version"] > 0)
    body = {"prompt": "a", "max_tokens": 1, "data_parallel_rank": 0}
    answer = httpx2.post(f"{clean.url}/v1/completions", json=body, headers=USER, timeout=120)
    answered = time.monotonic()
    for one in threads:
        one.join(60)
    assert (answer.status_code, done[0][0]) == (200, 200)
    assert ended[0] - answered < 1.0, "it was answered while the stream, of more than 2 s, still ran"


def test_sessions_meet_their_engine_and_are_counted_there(clean: LiveServer) -> None:
    with httpx2.Client(base_url=clean.url, headers=USER, timeout=120) as alice:
        names = [alice.post("/open_session", json={"capacity_of_str_len": 4000}).json() for _ in range(4)]
        assert [state["sessions"] for state in states(clean)] == [2, 2]
        taken = alice.post("/open_session", json={"capacity_of_str_len": 4000, "session_id": names[1]})
        assert "is open already" in taken.json()["error"]["message"]
        params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        for turn in range(3):
            for name in names:
                body = {"text": "and then?", "sampling_params": params, "session_params": {"id": name}}
                said = alice.post("/generate", json=body).json()
                assert said["meta_info"]["prompt_tokens"] == 9 + turn * 13
        fork = alice.post("/open_session", json={"capacity_of_str_len": 4000, "parent": names[2]}).json()
        for name in (*names, fork):
            assert alice.post("/close_session", json={"session_id": name}).status_code == 200
        assert alice.post("/close_session", json={"session_id": fork}).status_code == 400
    assert [state["sessions"] for state in states(clean)] == [0, 0]


def test_an_operators_request_goes_to_all_engines_or_the_one_named(clean: LiveServer) -> None:
    assert operator(clean, "/pause?engine=1")[0] == 200
    assert [state["paused"] for state in states(clean)] == [False, True]
    assert operator(clean, "/is_paused")[1] == {"is_paused": False, "engines": [False, True]}
    assert operator(clean, "/is_paused?engine=1")[1] == {"is_paused": True}
    assert operator(clean, "/resume")[0] == 200
    assert operator(clean, "/get_server_info?engine=0")[1]["state"]["paused"] is False
    for named in ("2", "one", "-1", ""):
        status, said = operator(clean, f"/flush_cache?engine={named}")
        assert (status, said["error"]["param"]) == (400, "engine")
        assert "must be a number from 0 to 1" in said["error"]["message"]
    changed = {"max_running_requests": 7}
    assert operator(clean, "/set_internal_state", {"server_args": changed})[0] == 200
    assert operator(clean, "/set_internal_state", {"server_args": {"page_size": 1}})[0] == 400


def test_a_drained_engine_gets_nothing_new_until_it_is_resumed(clean: LiveServer) -> None:
    def twelve() -> Counter[int | None]:
        before = len(routed(clean.log.parent / "run"))
        with client_of(clean, ALICE) as client:
            for _ in range(12):
                client.completions.create(model="qwen3-0.6b", prompt="a", max_tokens=1)
        return Counter(routed(clean.log.parent / "run")[before:])

    assert operator(clean, "/drain?engine=0")[0] == 200
    assert clean.status_of("/ready") == 200
    assert twelve() == {1: 12}
    assert operator(clean, "/drain")[0] == 200
    until(lambda: clean.status_of("/ready") == 503)
    with client_of(clean, ALICE) as client, pytest.raises(openai.InternalServerError, match="draining"):
        client.completions.create(model="qwen3-0.6b", prompt="a", max_tokens=1)
    assert operator(clean, "/resume")[0] == 200
    assert twelve() == {0: 6, 1: 6}


def settled(server: LiveServer, names: Sequence[str]) -> list[list[float]]:
    """Figures by engine, once all workers have added theirs."""
    found: list[list[float]] = []
    since_s = 0.0
    while not found or time.monotonic() - since_s < 4 * SHARED_S:
        newest = [per_engine(server, name) for name in names]
        if newest != found:
            found, since_s = newest, time.monotonic()
        time.sleep(0.02)
    return found


def test_figures_are_labelled_by_engine_and_their_sum_is_right(clean: LiveServer) -> None:
    names = ("lockstep_generation_tokens_total", "lockstep_prompt_tokens_total", "lockstep_num_requests_total")
    before = settled(clean, names)
    with client_of(clean, ALICE) as client:
        for number in range(8):
            client.completions.create(
                model="qwen3-0.6b",
                prompt=[f"{number}{at}" for at in "ab"],
                max_tokens=5,
                extra_body={"ignore_eos": True},
            )
    for after, then, each in zip(settled(clean, names), before, (5, 2, 1), strict=True):
        grown = [now - one for now, one in zip(after, then, strict=True)]
        assert sum(grown) == 16 * each
        assert min(grown) > 0
    assert per_engine(clean, "lockstep_engine_up") == [1, 1]
    load = httpx2.get(f"{clean.url}/load", headers=USER, timeout=120).json()
    assert [row["state"] for row in load["engines"]] == ["up", "up"]
    assert clean.status_of("/health_generate") == clean.status_of("/health") == 200


def test_abort_reaches_whichever_engine_has_it(clean: LiveServer) -> None:
    said: list[Any] = []

    def ask_endless(name: str) -> None:
        body = {"text": "a", "rid": name, "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}}
        said.append(httpx2.post(f"{clean.url}/generate", json=body, headers=USER, timeout=120).json())

    threads = [threading.Thread(target=ask_endless, args=(f"endless{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: [state["running"] for state in states(clean)] == [2, 2])
    assert operator(clean, "/flush_cache")[0] == 400
    for number in range(4):
        httpx2.post(f"{clean.url}/abort_request", json={"rid": f"endless{number}"}, headers=USER, timeout=120)
    for thread in threads:
        thread.join(120)
    assert [one["meta_info"]["finish_reason"]["type"] for one in said] == ["abort"] * 4


# ----------------------------------------------------------------------------------------------------- admission, live


@pytest.fixture(scope="module")
def queueing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("queueing")
    (folder / "keys.toml").write_text(KEYS)
    admission = ("--admission", "open=1,waiting=3,share.alice=2", "--api-keys", str(folder / "keys.toml"))
    given = ("--journal", str(folder / "run"), "--api-workers", "2", "--admin-socket", str(folder / "admin"))
    with serving(folder / "log", *EMULATED, *TWO, "--speed", "0.5", *admission, *given) as made:
        until(lambda: made.text().count(": ready: ") == 4)
        yield made


def test_requests_wait_at_the_router_and_end_there_too(queueing: LiveServer) -> None:
    """Requests beyond one per engine wait: some are refused, withdrawn or late, and others run."""
    ended: dict[str, tuple[int, Any]] = {}

    def ask_for(name: str, tokens: int = 30_000, **more: Any) -> threading.Thread:
        def run() -> None:
            params = {"max_new_tokens": tokens, "ignore_eos": True}
            body = {"text": "a", "rid": name, "sampling_params": params, **more}
            said = httpx2.post(f"{queueing.url}/generate", json=body, headers=USER, timeout=120)
            ended[name] = said.status_code, said.json()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def facts_of(reason: str) -> int:
        return sum(one.reason == reason for record in facts(run) for one in record.decided)

    def abort(name: str) -> None:  # through any worker
        with httpx2.Client(base_url=queueing.url, headers=USER, timeout=120) as another:
            assert another.post("/abort_request", json={"rid": name}).status_code == 200

    run = queueing.log.parent / "run"
    threads = [ask_for("first"), ask_for("second")]
    until(lambda: [state["running"] for state in states(queueing)] == [1, 1])
    threads += [ask_for("unwanted"), ask_for("gone"), ask_for("patient", 3)]
    until(lambda: facts_of("waits") == 3)
    assert [state["waiting"] for state in states(queueing)] == [0, 0]
    full = httpx2.post(f"{queueing.url}/generate", json={"text": "b"}, headers=USER, timeout=120)
    assert (full.status_code, full.headers["retry-after"]) == (503, "1")
    assert "the waiting queue of the router is full" in full.json()["error"]["message"]
    for name in ("unwanted", "gone"):
        abort(name)
        until(partial(ended.__contains__, name))
        assert ended[name][1]["meta_info"]["finish_reason"]["type"] == "abort"
    threads.append(ask_for("late", queue_timeout_s=0.5))
    until(lambda: "late" in ended)
    assert ended["late"][0] == 504
    assert set(ended) == {"unwanted", "gone", "late"}
    abort("second")
    until(lambda: "patient" in ended)
    assert ended["patient"][1]["meta_info"]["completion_tokens"] == 3
    abort("first")
    for thread in threads:
        thread.join(120)
    assert queueing.end(signal.SIGTERM) == 0
    assert verify_router(run)[1] == 8
    assert b"order" not in raw(run)
    for command, *words in ((journal, "verify", run), (explain, run, "--request", "patient")):
        shown = CliRunner().invoke(command, [str(word) for word in words])
        assert shown.exit_code == 0, shown.output


# ------------------------------------------------------------------------------------------------------------ policies


def shared_prefixes(server: LiveServer) -> float:
    """Send prompts with four long beginnings, a few each, and return the share of prompt tokens found in the cache."""
    rng = random.Random(5)
    beginnings = ["".join(rng.choices("abcdefgh ", k=1200)) for _ in range(4)]
    order = [beginning for beginning in beginnings for _ in range(6)]
    rng.shuffle(order)
    cached = prompts = 0
    with client_of(server) as client:
        for number, beginning in enumerate(order):
            used = client.completions.create(model="qwen3-0.6b", prompt=f"{beginning} {number}", max_tokens=2).usage
            cached, prompts = cached + used.prompt_tokens_details.cached_tokens, prompts + used.prompt_tokens
    return cached / prompts


SLOW = ("--speed", "0.1", "--snapshot-s", "0.5")


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("in_turn")
    given = ("--router", "round_robin", "--restarts", "1000", "--journal", str(folder / "run"))
    with serving(folder / "log", *ARGUMENTS, *TWO, *SLOW, *given) as made:
        yield made


@pytest.fixture(scope="module")
def affine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("affine")
    given = ("--router", "prefix_affinity", "--restarts", "1", "--journal", str(folder / "run"))
    with serving(folder / "log", *ARGUMENTS, *TWO, *SLOW, *given) as made:
        yield made


def test_requests_are_spread_as_the_router_decides_and_affinity_finds_cached_prefixes(
    in_turn: LiveServer, affine: LiveServer
) -> None:
    shares = [shared_prefixes(server) for server in (in_turn, affine)]
    homes = [routed(server.log.parent / "run") for server in (in_turn, affine)]
    assert homes[0] == [0, 1] * 12
    assert (len(homes[1]), set(homes[1])) == (24, {0, 1})
    assert shares[1] > shares[0] + 0.05, shares
    for server in (in_turn, affine):
        shown = CliRunner().invoke(journal, ["verify", str(server.log.parent / "run")])
        assert shown.exit_code == 1, shown.output
        assert shown.output.count("equal so far: ") == 3  # both engines, and the router: the server runs


@needs_chromium
def test_the_page_shows_all_engines_together_and_where_a_request_was(in_turn: LiveServer, tmp_path: Path) -> None:
    for number in range(2):
        body = {"prompt": "a", "max_tokens": 2}
        httpx2.post(f"{in_turn.url}/v1/completions", json=body, headers={"X-Request-Id": f"seen-{number}"}, timeout=120)
    rows = httpx2.get(f"{in_turn.url}/ui/requests", timeout=120).json()["requests"]
    (row,) = [row for row in rows if row["request_id"] == "seen-1"]
    dom = dom_of(f"{in_turn.url}/ui#seen-1", tmp_path / "profile", virtual_ms=4000).split("<script>")[0]
    assert "2 engines on 1 x H200-SXM, emulated" in dom
    assert "engines up<b>2 of 2</b>" in dom
    run = in_turn.log.parent / "run" / "engines" / str(row["engine"])
    assert f"lockstep explain {run} --request {row['label']}" in dom


# ---------------------------------------------------------------------------------------------------------- failures


def test_a_worker_that_begins_while_an_engine_is_away_serves_with_the_other(in_turn: LiveServer) -> None:
    """The engine is stopped as soon as it exists."""
    children = in_turn.children()
    fork_server = children["fork_server 1"]
    forked = Path(f"/proc/{fork_server}/task/{fork_server}/children")
    if not forked.exists():
        pytest.skip("this kernel does not list a process's children")
    os.kill(children["engine 1"], signal.SIGKILL)
    while not (pids := [int(pid) for pid in forked.read_text().split() if int(pid) != children["engine 1"]]):
        assert in_turn.process.poll() is None  # no pause: it must be stopped before it serves
    (away,) = pids
    os.kill(away, signal.SIGSTOP)
    try:
        os.kill(children["worker 0"], signal.SIGKILL)
        until(lambda: in_turn.status_of("/ready") == 200)
        with client_of(in_turn) as client:
            for _ in range(3):
                client.completions.create(model="qwen3-0.6b", prompt="a", max_tokens=2)
        assert per_engine(in_turn, "lockstep_engine_up") == [1, 0]
    finally:
        os.kill(away, signal.SIGCONT)
    until(lambda: per_engine(in_turn, "lockstep_engine_up") == [1, 1])


def test_messages_of_an_engine_reach_a_router_that_was_stopped(in_turn: LiveServer) -> None:
    """The router, a thread of the launcher, is stopped for longer than a socket lingers."""
    before = in_turn.children()["engine 1"]
    os.kill(before, signal.SIGKILL)
    until(lambda: in_turn.children().get("engine 1", before) != before)
    in_turn.process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    in_turn.process.send_signal(signal.SIGCONT)
    until(lambda: per_engine(in_turn, "lockstep_engine_up") == [1, 1])

    def homes() -> set[int | None]:
        known = len(routed(in_turn.log.parent / "run"))
        with client_of(in_turn) as client:
            for _ in range(2):
                client.completions.create(model="qwen3-0.6b", prompt="a", max_tokens=2)
        return set(routed(in_turn.log.parent / "run")[known:])

    until(lambda: homes() == {0, 1})


def test_tokens_of_the_other_engine_do_not_end_the_wait_for_the_killed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, tally = {"0": 10.0, "1": 20.0}, Tally()
    monkeypatch.setattr(kills, "tokens_of_engine", lambda _, number: sent[number])
    monkeypatch.setattr(kills, "DRAINED_S", 0.0)
    monkeypatch.setattr(kills, "POLL_S", 0.0)
    server: Any = SimpleNamespace(process=SimpleNamespace(poll=lambda: None))
    awaited = kills.Awaited(server, "engine 1", tally)
    assert awaited.took_s() is None
    sent["0"], tally.heard_s = 11.0, time.monotonic()
    assert awaited.took_s() is None
    sent["1"] = 21.0
    assert awaited.took_s() is not None


def test_an_engine_killed_under_its_streams_loses_nothing_and_the_other_is_not_affected(in_turn: LiveServer) -> None:
    run, seed = in_turn.log.parent / "run", random.SystemRandom().randrange(2**31)
    outcome = campaign(in_turn, seed=seed, kills=6)
    told = f"--dp 2 --seed {seed}\n{outcome.text()}\n{in_turn.text()[-3000:]}"
    assert not outcome.tally.faults, told
    assert outcome.kills == 6, told
    assert outcome.tally.requests >= 32, told
    until(lambda: per_engine(in_turn, "lockstep_engine_up") == [1, 1])
    with client_of(in_turn) as client:
        for _ in range(2):  # one for each engine, which then reports its state
            client.completions.create(model="qwen3-0.6b", prompt="a", max_tokens=3)
    ends = [in_turn.text().count(f"engine {engine} ended with signal SIGKILL") for engine in (0, 1)]
    assert sum(ends) >= 6
    until(lambda: per_engine(in_turn, "lockstep_engine_restarts_total") == ends)
    label = httpx2.get(f"{in_turn.url}/ui/requests", timeout=120).json()["requests"][0]["label"]
    assert in_turn.end(signal.SIGINT) == 130
    for command, *words in ((replay, run), (diff, run, run), (explain, run, "--request", label)):
        shown = CliRunner().invoke(command, [str(word) for word in words])
        assert shown.exit_code == 0, shown.output
        assert shown.output.count("equal: ") == {replay: 3, diff: 2, explain: 0}[command]
    down: set[int] = set()
    for record in facts(run):
        if isinstance(record.fact, EngineChanged):
            down = down - {record.fact.engine} if record.fact.state == "up" else down | {record.fact.engine}
        if isinstance(record.fact, RequestOffered) and record.routed is not None:
            assert record.routed.engine not in down


def test_an_engine_that_is_given_up_leaves_the_server_to_the_other(affine: LiveServer) -> None:
    def killed(name: str) -> None:
        until(lambda: name in affine.children())
        before = affine.children()[name]
        os.kill(before, signal.SIGKILL)
        until(lambda: affine.process.poll() is not None or affine.children().get(name) != before)

    killed("engine 1")
    until(lambda: per_engine(affine, "lockstep_engine_up") == [1, 1])
    killed("engine 1")
    until(lambda: per_engine(affine, "lockstep_engine_up") == [1, 0])
    assert affine.status_of("/ready") == affine.status_of("/health") == 200
    tally, rng = Tally(), random.Random(1)
    for number in range(4):
        serve_one(affine.url, ask(rng, str(number), (5, 9)), tally)
    assert not tally.faults, tally.first
    killed("engine 0")
    killed("engine 0")
    assert affine.process.wait(120) == 1
