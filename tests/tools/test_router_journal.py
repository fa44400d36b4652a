"""A router's journal that was cut, altered, doubled or reordered is never reported as equal, and never a traceback."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lockstep.core.cluster.dispatch import DispatchConfig
from lockstep.core.cluster.router import (
    EngineChanged,
    EngineShare,
    RequestEnded,
    RequestOffered,
    RequestRouted,
    Router,
    RouterConfig,
)
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import RequestArrived, TokenIds
from lockstep.core.journal.reader import read_journal, scan_folder
from lockstep.core.journal.records import KIND_END, JournalError, JournalHeader
from lockstep.core.journal.writer import JournalWriter
from lockstep.host.router_check import compare_with_engines, verify_router
from lockstep.host.router_journal import RouterHeader, RouterJournal, RouterReader, has_router, routes_of
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.run.run_folder import prepare_folder
from lockstep.sim.scenario.scenario import Scenario
from lockstep.tools.journal import journal
from tests.support.routed import as_old_file

SHARES = (EngineShare(), EngineShare())


def invoke(*words: object) -> Result:
    result = CliRunner().invoke(journal, [str(word) for word in words])
    assert isinstance(result.exception, SystemExit | None), result.exc_info
    return result


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster of two engines and 30 requests."""
    folder = tmp_path_factory.mktemp("runs") / "cluster"
    base = Scenario(model="qwen3-0.6b", gpu="h200", workload="gen:n=30,rate=300,input=fixed:40,output=fixed:6")
    simulate_cluster(assemble_cluster(ClusterScenario(base=base, replicas=2), {}), folder=folder)
    return folder


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def segment(run: Path) -> Path:
    return run / "router/00000000.log"


def records(run: Path) -> list[bytes]:
    """The bytes of each record."""
    data = segment(run).read_bytes()
    starts = [frame.offset for frame in scan_folder(run / "router").frames()]
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]


def test_a_whole_cluster_is_equal_and_clean(run: Path) -> None:
    result = invoke("verify", run)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "router: equal: 60 facts, 30 decisions" in result.stdout
    checked = invoke("check", run)
    assert (checked.exit_code, checked.stderr) == (0, "")
    assert [line.split(";")[0] for line in checked.stdout.splitlines()] == [
        "engine 0: clean, closed",
        "engine 1: clean, closed",
        "router: clean, closed",
    ]
    dumped = [json.loads(line) for line in invoke("dump", run / "router").stdout.splitlines()]
    assert len(dumped) == 61
    assert (dumped[0]["router"]["policy"], dumped[1]["fact"]["type"]) == ("least_requests", "RequestOffered")
    assert "router" in [json.loads(line) for line in invoke("check", run, "--json").stdout.splitlines()][-1]


def test_cut_after_any_record_it_is_not_equal(run: Path) -> None:
    all_records = records(run)
    for kept in range(len(all_records)):
        segment(run).write_bytes(b"".join(all_records[:kept]))
        result = invoke("verify", run)
        assert result.exit_code == (1 if kept else 2), f"{kept} records kept: {result.output}"
        assert "router: equal:" not in result.stdout
        if 0 < kept <= 30:
            assert "that the router did not send there" in result.stderr


def test_cut_inside_any_record_it_is_torn_and_can_be_repaired(run: Path) -> None:
    data = segment(run).read_bytes()
    for size in range(len(records(run)[0]) + 1, len(data), 97):
        segment(run).write_bytes(data[:size])
        assert invoke("verify", run).exit_code == 1
        checked = invoke("check", run)
        assert checked.exit_code in (0, 1)
        if checked.exit_code:
            assert "repaired: cut" in invoke("check", run, "--repair").stdout
            assert invoke("check", run).exit_code == 0


def test_any_record_lost_doubled_or_moved_is_corrupt(run: Path) -> None:
    all_records = records(run)
    chosen = random.Random(7)
    for _ in range(150):
        damaged = list(all_records)
        here, there = chosen.sample(range(len(damaged) - 1), 2)
        match chosen.randrange(3):
            case 0:
                del damaged[here]
            case 1:
                damaged.insert(there, damaged[here])
            case _:
                damaged[here], damaged[there] = damaged[there], damaged[here]
        segment(run).write_bytes(b"".join(damaged))
        for command in ("verify", "check"):
            result = invoke(command, run)
            assert (result.exit_code, result.stderr[:7]) == (2, "Journal"), result.output


def test_any_flipped_bit_is_noticed(run: Path) -> None:
    data = segment(run).read_bytes()
    chosen = random.Random(7)
    for _ in range(100):
        place = chosen.randrange(len(data))
        segment(run).write_bytes(data[:place] + bytes((data[place] ^ 1 << chosen.randrange(8),)) + data[place + 1 :])
        assert invoke("verify", run).exit_code in (1, 2)
        assert invoke("check", run).exit_code in (1, 2)


def test_a_router_of_another_run_has_other_requests_than_the_engines(recorded: Path, run: Path, tmp_path: Path) -> None:
    base = Scenario(model="qwen3-0.6b", gpu="h200", workload="gen:n=29,rate=300,input=fixed:40,output=fixed:6")
    simulate_cluster(assemble_cluster(ClusterScenario(base=base, replicas=2), {}), folder=tmp_path / "other")
    shutil.rmtree(run / "router")
    shutil.copytree(tmp_path / "other/router", run / "router")
    result = invoke("verify", run)
    assert result.exit_code == 2
    assert "engine 1 has 1 request (29) that the router did not send there" in result.stderr
    differences = json.loads(invoke("verify", run, "--json").stdout.splitlines()[-1])["router_and_engines"]
    assert len(differences) == 1
    shutil.rmtree(tmp_path / "other/engines")
    shutil.copytree(recorded / "engines", tmp_path / "other/engines")
    assert compare_with_engines(tmp_path / "other") == differences


def test_requests_that_no_engine_has_are_reported_where_all_are_closed(recorded: Path, tmp_path: Path) -> None:
    base = Scenario(model="qwen3-0.6b", gpu="h200", workload="gen:n=29,rate=300,input=fixed:40,output=fixed:6")
    run = tmp_path / "run"
    simulate_cluster(assemble_cluster(ClusterScenario(base=base, replicas=2), {}), folder=run)
    shutil.rmtree(run / "router")
    shutil.copytree(recorded / "router", run / "router")
    assert compare_with_engines(run) == ["the router sent 1 request (29) to engine 1, which does not have them"]


def served(folder: Path, *, routed: int, arrived: int, drained: bool = False, expired: bool = False) -> list[str]:
    """Two engines of a server: the first was sent `routed` requests and has `arrived`, each of which came twice."""
    dispatch = DispatchConfig() if drained else None
    for engine in range(2):
        header = JournalHeader(config=SchedConfig(), host={"kind": "emulated"})
        with JournalWriter.create(folder / "engines" / str(engine), header) as writer:
            for number in range(0 if engine else 2 * arrived):
                prompt, origin = TokenIds(bytes(40)), f"server/0/{number // 2}"
                event = RequestArrived(time_us=1, request_id=number, prompt=prompt, max_new_tokens=1, origin=origin)
                writer.append(event, bytes(16))
    with RouterJournal(folder, RouterConfig(), SHARES, dispatch, bytes_max=10**6) as router:
        if drained:
            router.append_decided(EngineChanged(time_us=0, engine=1, state="draining"), (), bytes(16))
        for number in range(routed + 1):  # the first one opens a session, which is no request
            offered = RequestOffered(time_us=1, request_id=number, prompt_tokens=9 if number else 0)
            one = RequestRouted(request_id=number, engine=0, reason="policy")
            router.append(offered, one, bytes(16))
        if expired:
            router.begin_life(RouterConfig(), SHARES)
    if expired:
        segment(folder).unlink()
    return compare_with_engines(folder)


def test_an_engine_of_a_server_has_no_more_requests_than_were_sent_there(tmp_path: Path) -> None:
    assert served(tmp_path / "all", routed=7, arrived=7) == []
    assert served(tmp_path / "some left before", routed=9, arrived=7) == []
    found = ["engine 0 has 7 requests, the router sent 6 there"]
    assert served(tmp_path / "cut", routed=6, arrived=7) == found
    assert served(tmp_path / "refused while drained", routed=6, arrived=7, drained=True) == []
    assert served(tmp_path / "expired", routed=6, arrived=7, expired=True) == []


# ----------------------------------------------------------------------------------------------- lives and old versions


def add_life(run: Path, facts: int, *, bytes_max: int = 10**6) -> None:
    router = Router(RouterConfig(), SHARES)
    with RouterJournal(run, RouterConfig(), SHARES, live=True, bytes_max=bytes_max) as one:
        for number in range(facts):
            offered = RequestOffered(time_us=number, request_id=number, prompt_tokens=9)
            one.append(offered, router.step(offered), router.digest)
            ended = RequestEnded(time_us=number, request_id=number)
            one.append(ended, router.step(ended), router.digest)


def test_lives_are_one_journal(tmp_path: Path) -> None:
    for facts in (3, 0, 5):
        add_life(tmp_path, facts)
    done = verify_router(tmp_path)
    assert (done.facts, done.decisions) == (16, 8)
    assert done.tail is not None
    assert (done.tail.segment, done.tail.closed, done.tail.records) == ("00000002.log", True, 3 + 16 + 3)
    (tmp_path / "router/00000001.log").unlink()
    with pytest.raises(JournalError, match=r"00000001.log is corrupt .* missing segment"):
        verify_router(tmp_path)


def test_a_killed_router_is_continued_behind_its_last_whole_record(tmp_path: Path) -> None:
    add_life(tmp_path, 4)
    data = segment(tmp_path).read_bytes()
    for size in (len(data) - 50, len(data) - 200, 20):  # the end record and more; the last with less than a header
        segment(tmp_path).write_bytes(data[:size])
        (tmp_path / "router/00000001.log").unlink(missing_ok=True)
        add_life(tmp_path, 1)
        done = verify_router(tmp_path)
        assert done.tail is not None
        assert done.tail.closed
        lives = [one for _, one in RouterReader(tmp_path).entries() if isinstance(one, RouterHeader)]
        assert len(lives) == (2 if size > 100 else 1)


def test_the_oldest_lives_expire(tmp_path: Path) -> None:
    for _ in range(5):
        add_life(tmp_path, 20)
    size = segment(tmp_path).stat().st_size
    add_life(tmp_path, 20, bytes_max=3 * size + 100)
    assert [path.name[7] for path in sorted((tmp_path / "router").iterdir())] == ["2", "3", "4", "5"]
    assert verify_router(tmp_path).facts == 4 * 40
    (tmp_path / "router/00000002.log").unlink()
    assert verify_router(tmp_path).facts == 3 * 40  # indistinguishable from an expired one


def test_a_life_that_begins_while_the_server_runs_needs_no_new_journal(tmp_path: Path) -> None:
    with RouterJournal(tmp_path, RouterConfig(), SHARES, live=True, bytes_max=10**6) as one:
        one.append(RequestEnded(time_us=5, request_id=1), None, bytes(16))
        one.begin_life(RouterConfig(policy="round_robin"), SHARES)
        one.append(RequestEnded(time_us=0, request_id=1), None, bytes(16))  # another clock
    lives = [one for _, one in RouterReader(tmp_path).entries() if isinstance(one, RouterHeader)]
    assert [one.router.policy for one in lives] == ["least_requests", "round_robin"]
    assert verify_router(tmp_path).facts == 2


def test_the_segment_that_is_written_never_expires(tmp_path: Path) -> None:
    with RouterJournal(tmp_path, RouterConfig(), SHARES, live=True, bytes_max=1) as one:
        for life in range(1, 4):
            one.append(RequestEnded(time_us=5, request_id=1), None, bytes(16))
            one.begin_life(RouterConfig(), SHARES)
            assert [path.name for path in (tmp_path / "router").glob("*.log")] == [f"{life:08}.log"]


def test_a_second_journal_is_refused(run: Path) -> None:
    with pytest.raises(JournalError, match="already has the journal of a router"):
        RouterJournal(run, RouterConfig(), SHARES)
    as_old_file(run)
    with pytest.raises(JournalError, match="already has the journal of a router"):
        RouterJournal(run, RouterConfig(), SHARES)
    prepare_folder(run, overwrite=True)
    assert not has_router(run)
    assert not (run / "router").exists()


def test_an_old_file_is_read_with_a_note(run: Path) -> None:
    routes = routes_of(run, range(30))
    path = as_old_file(run)
    assert routes_of(run, range(30)) == routes
    result = invoke("verify", run)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "router: equal: 60 facts, 30 decisions" in result.stdout
    assert (
        f"{path} is of an earlier version, without checksums: lost or altered lines may go unnoticed" in result.stdout
    )
    assert "of an earlier version" in invoke("check", run).stdout


def test_an_old_file_that_was_cut_or_reordered_is_compared_with_the_engines(run: Path) -> None:
    path = as_old_file(run)
    lines = path.read_bytes().splitlines(keepends=True)
    offers = [number for number, line in enumerate(lines) if b"RequestOffered" in line]
    for kept in range(1, offers[-1]):
        path.write_bytes(b"".join(lines[:kept]))
        result = invoke("verify", run)
        assert result.exit_code == 2, f"{kept} lines kept: {result.output}"
    chosen = random.Random(7)
    for _ in range(40):  # two offers change places, or one is doubled: a replay raises or decides otherwise
        here, there = chosen.sample(offers, 2)
        damaged = list(lines)
        if chosen.random() < 0.5:
            damaged[here], damaged[there] = damaged[there], damaged[here]
        else:
            damaged.insert(there + 1, damaged[here])
        path.write_bytes(b"".join(damaged))
        result = invoke("verify", run)
        assert result.exit_code == 3, result.output
        assert result.stderr.startswith("Divergence: ")


def test_the_journals_of_router_and_engine_are_not_taken_for_each_other(run: Path) -> None:
    with pytest.raises(JournalError, match="is the journal of a router, expected that of an engine"):
        read_journal(run / "router")
    shutil.copy(run / "engines/0/journal/00000000.log", segment(run))
    with pytest.raises(JournalError, match="is the journal of an engine, expected that of a router"):
        verify_router(run)
    assert list(scan_folder(run / "router").frames())[-1].kind == KIND_END
