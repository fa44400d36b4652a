"""Clusters with replicas that are added and removed, engines that report late, and requests that wait at the router."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from lockstep.core.cluster.router import RouterConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.replay import replay
from lockstep.host.admission_options import admission_word, parse_admission
from lockstep.host.router_check import verify_router
from lockstep.sim.cli.stored_command import requested_by_command
from lockstep.sim.cluster.prices import cost_over_time, parse_price
from lockstep.sim.cluster.result import ClusterRun, replicas_text
from lockstep.sim.cluster.scenario import ClusterScenario, EngineGroup, parse_scaling
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.mix import mix_of
from tests.support.routed import lines

SPEC = "gen:n=150,rate=30,turns=uniform:1:3,think=lognormal:300ms:0.9,input=lognormal:300:0.9,output=lognormal:60:0.9"
BASE = Scenario(model="qwen3-8b", gpu="h100", workload=SPEC, slos=(Slo.parse("ttft_p99=500ms"),))
BUSY = "open_requests=4,minimum=1,start=300ms,interval=100ms,window=0s,cooldown=500ms"


def run(scenario: Scenario = BASE, *, folder: Path | None = None, eager: bool = False, **cluster: Any) -> ClusterRun:
    return simulate_cluster(assemble_cluster(ClusterScenario(base=scenario, **cluster)), folder=folder, eager=eager)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def facts(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line["fact"] for line in lines(folder) if line["fact"]["type"] == kind]


@settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking takes minutes
)
@given(
    policy=st.sampled_from(["least_requests", "total_requests", "total_tokens", "prefix_affinity"]),
    replicas=st.integers(2, 4),
    hop_us=st.sampled_from([0, 700]),
    think=st.sampled_from(["fixed:1us", "exponential:80ms"]),
    scaling=st.sampled_from([None, BUSY, "arrival_rate=5,start=0s,interval=70ms,window=1s,cooldown=0s"]),
    admission=st.sampled_from([None, "open=2", "open=3,waiting=4"]),
    reports=st.sampled_from([(0, 0), (50_000, 0), (50_000, 120_000)]),
)
@example(  # a lane that ran ahead by a hop reported a time after its report
    policy="total_requests",
    replicas=2,
    hop_us=700,
    think="exponential:80ms",
    scaling=None,
    admission=None,
    reports=(50_000, 0),
)
def test_engines_that_run_ahead_do_what_they_do_side_by_side(
    tmp_path_factory: pytest.TempPathFactory,
    policy: str,
    replicas: int,
    hop_us: int,
    think: str,
    scaling: str | None,
    admission: str | None,
    reports: tuple[int, int],
) -> None:
    """To the byte, with replicas added and removed and requests waiting; and every request ends in one place."""
    spec = f"gen:n=40,rate=40,turns=uniform:1:3,think={think},input=uniform:1:700,output=uniform:1:40"
    reporting = policy.startswith("total_")
    cluster = {
        "replicas": replicas,
        "router": RouterConfig(policy=policy),  # type: ignore[arg-type]
        "hop_us": hop_us,
        "scaling": None if scaling is None else parse_scaling(scaling),
        "dispatch": None if admission is None else parse_admission(admission),
        "report_interval_us": reports[0] if reporting else 0,
        "report_delay_us": reports[1] if reporting else 0,
    }
    lazy, eager = tmp_path_factory.mktemp("lazy"), tmp_path_factory.mktemp("eager")
    scenario = replace(BASE, workload=spec)
    first = run(scenario, folder=lazy, **cluster)
    second = run(scenario, folder=eager, eager=True, **cluster)
    assert files(lazy) == files(eager)
    assert first.metrics() == second.metrics()
    verify_router(lazy)
    requests = first.data.summary["requests"]
    assert requests["arrived"] + first.never_sent == 40
    assert requests["completed"] + requests["rejected"] == requests["arrived"]
    assert not requests["unfinished"]
    assert first.data.requests.request_id.tolist() == list(range(requests["arrived"]))


# ------------------------------------------------------------------------------------------------------------ replicas


def test_replicas_come_with_the_load_and_cost_less_than_all_of_them_all_the_time(tmp_path: Path) -> None:
    quiet = "gen:n=12,rate=2,input=fixed:300,output=fixed:20"
    flat = run(replace(BASE, workload=quiet), replicas=4, scaling=parse_scaling(BUSY)).autoscale
    assert flat is not None
    assert (flat["starts"], flat["replicas_mean"]) == (0, 1.0)
    done = run(replicas=4, folder=tmp_path, scaling=parse_scaling(BUSY))
    found = done.autoscale
    assert found is not None
    assert found["starts"] >= 2
    assert 1.0 < found["replicas_mean"] < 4.0
    assert found["replica_hours"] == pytest.approx(found["replicas_mean"] * found["replica_hours_fixed"] / 4, rel=1e-3)
    assert done.metrics()["autoscale"] == found
    assert any(line.startswith("autoscale: ") for line in done.remarks())
    fixed = run(replicas=4)
    assert "autoscale" not in fixed.metrics()
    assert "autoscale" not in fixed.about()


def test_a_replica_that_comes_back_has_an_empty_cache_and_replays(tmp_path: Path) -> None:
    """Bursts of equal prompts with pauses: a replica that was removed and added again computes them anew."""
    burst = "gen:n=60,rate=40,input=fixed:600,output=uniform:1:90,turns=fixed:3,think=fixed:8s"
    scaling = parse_scaling("open_requests=2,minimum=1,start=0s,interval=50ms,window=0s,cooldown=0s")
    run(replace(BASE, workload=burst), replicas=3, folder=tmp_path, scaling=scaling)
    changes = [(fact["engine"], fact["state"]) for fact in facts(tmp_path, "EngineChanged")]
    assert changes[:2] == [(1, "down"), (2, "down")]
    assert changes.count((1, "up")) >= 2
    assert "draining" in [state for _, state in changes]
    journal = (tmp_path / "engines" / "1" / "journal" / "00000000.log").read_bytes()
    assert b"Flush" in journal
    for engine in range(3):
        replay(tmp_path / "engines" / str(engine))
    sent: dict[int, str] = {1: "down", 2: "down"}
    for line in lines(tmp_path):
        if line["fact"]["type"] == "EngineChanged":
            sent[line["fact"]["engine"]] = line["fact"]["state"]
        elif "routed" in line:
            assert sent.get(line["routed"]["engine"], "up") == "up"


# ------------------------------------------------------------------------------------------------------- reports, waits


def test_reports_report_what_engines_had_when_they_were_made(tmp_path: Path) -> None:
    router = RouterConfig(policy="total_requests")
    run(replicas=3, folder=tmp_path, router=router, report_interval_us=40_000, report_delay_us=90_000)
    reports = facts(tmp_path, "LoadReported")
    assert len(reports) > 100
    assert {report["time_us"] - report["measured_us"] for report in reports} == {90_000}
    assert all(report["measured_us"] % 40_000 == 0 for report in reports)
    sent: list[tuple[int, int]] = []  # when, engine
    ended: list[tuple[int, int]] = []
    engine_of: dict[int, int] = {}
    for line in lines(tmp_path):
        fact = line["fact"]
        if "routed" in line:
            engine_of[fact["request_id"]] = line["routed"]["engine"]
            sent.append((fact["time_us"], line["routed"]["engine"]))
        elif fact["type"] == "RequestEnded":
            ended.append((fact["time_us"], engine_of[fact["request_id"]]))
    exact = 0
    for report in reports:
        moment, engine = report["measured_us"], report.get("engine", 0)
        had = sum(time_us < moment and at == engine for time_us, at in sent)
        had -= sum(time_us < moment and at == engine for time_us, at in ended)
        assert had - 3 <= report["requests"] <= had  # those that arrived while its lane was busy are not in it yet
        exact += report["requests"] == had
        assert (report["tokens"] > 0) == (report["requests"] > 0) or report["requests"] <= 1
    assert exact > 0.85 * len(reports)


def test_a_waiting_request_at_the_router_waits_for_its_first_token_and_shares_are_kept() -> None:
    lengths = "input=fixed:400,output=fixed:40"
    mixed = mix_of((f"flood=gen:n=90,{lengths}@2000", f"calm=gen:n=8,{lengths}@10"))
    fair = run(replace(BASE, workload=mixed, slos=()), replicas=2, dispatch=parse_admission("open=6"))
    assert fair.admission is not None
    assert fair.admission["waited"] > 50
    assert fair.data.summary["requests"]["completed"] == 98
    requests = fair.data.requests
    assert 0 < fair.admission["wait_us_max"] < int(requests.ttft_us.max())
    calm = requests.tenant == "calm"
    assert calm.sum() == 8
    assert np.median(requests.ttft_us[calm]) < 0.2 * np.median(requests.ttft_us[~calm])


def test_the_refused_count_as_failed() -> None:
    scenario = replace(BASE, workload="gen:n=40,rate=inf,input=fixed:400,output=fixed:40")
    done = run(scenario, replicas=1, dispatch=parse_admission("open=4,waiting=10"))
    assert done.admission is not None
    assert done.admission["refused"] == 26
    requests = done.data.summary["requests"]
    assert (requests["arrived"], requests["completed"], requests["failed"]) == (40, 14, 26)
    assert requests["by_reject_reason"] == {"queue_full": 26}
    assert done.data.summary["slos"][0]["met"] is False
    assert done.data.requests.finish_reason.tolist().count("rejected_queue_full") == 26


# ----------------------------------------------------------------------------------------------- spec and command line


def test_specs_read_back() -> None:
    text = "open_requests=24,minimum=2,start=60s,cooldown=5min,tolerance=0.2"
    assert parse_scaling(str(parse_scaling(text))) == parse_scaling(text)
    for word in ("open=8,waiting=50,share.a=2.5", "open=8,order=priority", "open=1"):
        assert admission_word(parse_admission(word)) == word


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_scaling, "minimum=2", "`autoscale` names no policy, got `minimum=2`"),
        (parse_scaling, "open_requests=24,start=soon", "`autoscale`: `start` cannot be `soon`"),
        (parse_scaling, "open_requests=-1", "`autoscale`: `open_requests` must be above 0 and finite, got `-1.0`"),
        (parse_scaling, "arrival_rate=nan", "`autoscale`: `arrival_rate` must be above 0 and finite, got `nan`"),
        (parse_scaling, "open_tokens=9,minimum=0", "`autoscale`: `minimum` must be a whole number from 1 to 1024"),
        (parse_scaling, "open_tokens=9,minimum=2000", "`autoscale`: `minimum` must be a whole number from 1 to 1024"),
        (parse_scaling, "open_tokens=9,interval=0s", "`autoscale`: `interval` must be at least 1 us, got `0`"),
        (parse_scaling, "open_tokens=9,tolerance=1", "`autoscale`: `tolerance` must be at least 0 and below 1"),
        (parse_scaling, "open_requests=2,open_tokens=9", "`autoscale` has `open_tokens=9`, expected one policy"),
        (parse_scaling, "open_requests", "`autoscale` has `open_requests` without a value"),
        (parse_admission, "waiting=5", "`admission` has no limit, got `waiting=5`"),
        (
            parse_admission,
            "open=0",
            "`admission`: `open` must be a whole number of at least 1, got `0`\nhint: such as ",
        ),
        (parse_admission, "open=1,waiting=-1", "`admission`: `waiting` must be a whole number of at least 0, got `-1`"),
        (parse_admission, "open=1,share.a.b=nan", "`admission`: `share.a.b` must be above 0 and finite, got `nan`"),
        (parse_admission, "open=many", "`admission`: `open` cannot be `many`"),
        (parse_admission, "open=2,order=lifo", "`admission`: `order` must be fcfs or priority, got `lifo`"),
        (parse_admission, "open=2,open=3", "`admission` has `open=3` twice"),
    ],
)
def test_a_spec_that_cannot_be_read_reports_where(parse: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_a_share_of_a_tenant_that_there_is_not_is_refused() -> None:
    few = "gen:n=2,rate=5"
    mixed = mix_of((f"flood={few}", f"calm={few}"))
    many = mix_of(tuple(f"t{number:02}={few}" for number in range(12)))
    cases = (
        (few, "open=4,share.x=2", "has a share for `x`, .*: it has no tenants\nhint: leave it out"),
        (mixed, "open=4,share.calm=2,share.clam=3", "has a share for `clam`, .*: its tenants are calm, flood\n"),
        (many, "open=4,share.x=2", "its tenants are t00, .*, t09 and 2 more\n"),
    )
    for workload, word, message in cases:
        scenario = ClusterScenario(base=replace(BASE, workload=workload), replicas=2, dispatch=parse_admission(word))
        with pytest.raises(ConfigError, match=message):
            assemble_cluster(scenario)
    assemble_cluster(
        ClusterScenario(base=replace(BASE, workload=mixed), replicas=2, dispatch=parse_admission("open=4,share.calm=2"))
    )


def test_options_that_do_nothing_here_are_refused() -> None:
    groups = (EngineGroup(count=1, gpu="h100"), EngineGroup(count=1, gpu="h200"))
    for cluster, message in (
        ({"report_interval_us": 5}, "`router_report_interval` is a setting of total_requests and total_tokens"),
        ({"report_delay_us": 5}, "`router_report_delay` needs reports"),
        ({"scaling": parse_scaling(BUSY), "engines": groups}, "`autoscale` is for equal engines"),
        (
            {"scaling": parse_scaling("open_requests=4,minimum=3"), "replicas": 2},
            "`minimum` is 3, but there are 2 replicas",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            assemble_cluster(ClusterScenario(base=BASE, **cluster))


def test_the_command_line_reports_what_replicas_cost_and_its_command_repeats_it(tmp_path: Path) -> None:
    from lockstep.sim.cli.simulate import simulate as command

    arguments = [
        *("--model", "qwen3-8b", "--gpu", "h100", "--replicas", "3", "--router", "total_tokens"),
        *("--workload", f"x={SPEC}"),
        *("--router-report-interval", "50ms", "--router-report-delay", "10ms", "--autoscale", BUSY),
        *("--admission", "open=4,share.x=2", "--no-trace", "--no-intervals", "--no-report", "--no-requests"),
    ]
    shown = CliRunner().invoke(command, [*arguments, "--out", str(tmp_path / "a")])
    assert shown.exit_code == 0, shown.output
    assert "replica-hours" in shown.stdout
    assert "waited at the router" in shown.stdout
    metrics = json.loads((tmp_path / "a/metrics.json").read_text())
    again = metrics["about"]["command"].split()[2:]
    second = CliRunner().invoke(command, [*again, *arguments[-4:], "--out", str(tmp_path / "b")])
    assert second.exit_code == 0, second.output
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert CliRunner().invoke(command, [*again, "--json", "--no-intervals"]).exit_code == 0


def test_an_autoscaled_run_has_its_dollars_its_replicas_over_time_and_the_memory_of_started_engines_only() -> None:
    done = run(replicas=12, scaling=parse_scaling(BUSY))
    scaled = done.autoscale
    assert scaled is not None
    assert scaled["usd"] == pytest.approx(scaled["gpu_hours"] * scaled["usd_per_gpu_hour"], abs=1e-3)
    assert scaled["usd"] < scaled["usd_fixed"]
    started = max(count for _, count in scaled["replicas_by_time"])
    assert started < 12
    assert done.data.summary["kv"]["pages"] % done.engines[0].data.summary["kv"]["pages"] == 0
    assert done.data.summary["kv"]["pages"] < 12 * done.engines[0].data.summary["kv"]["pages"]
    remarks = done.remarks()
    assert any(line.startswith("cost: ") and " $ per GPU-hour (rental_3yr)" in line for line in remarks)
    assert any(line.startswith("replicas over time: ") and ", 1 from " in line for line in remarks)


def test_many_changes_of_replicas_are_shown_by_parts_of_time() -> None:
    by_time = [(1_000_000 * second, 1 + second % 7) for second in range(200)]
    text = replicas_text(by_time)
    assert text.startswith("at most ")
    assert text.count("from") <= 24
    assert "7 from" in text


# ------------------------------------------------------------------------------------------------ prices over the day


def test_prices_hold_from_their_time_of_the_day_on_and_repeat_every_day() -> None:
    price = parse_price("8h=2,20h=0.5")
    hour = 3_600_000_000
    assert price.usd(0, 8 * hour) == pytest.approx(8 * 0.5)  # the last price of the day before
    assert price.usd(7 * hour, 21 * hour) == pytest.approx(0.5 + 12 * 2 + 0.5)
    assert price.usd(24 * hour, 48 * hour) == pytest.approx(price.usd(0, 24 * hour))
    assert price.mean == pytest.approx((12 * 2 + 12 * 0.5) / 24)
    assert parse_price(str(price)) == price
    assert parse_price("1.25").usd(0, 2 * hour) == 2.5


@pytest.mark.parametrize("text", ["", "0", "-1", "8h", "8h=x", "25h=1", "8h=1,8h=2", "inf"])
def test_impossible_prices_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="`price`"):
        parse_price(text)


def test_cost_over_time_is_that_of_the_replicas_at_the_prices_of_the_hours() -> None:
    hour = 3_600_000_000
    cost = cost_over_time(parse_price("0h=1,1h=3"), [(0, 1), (hour // 2, 2), (2 * hour, 0)], 3 * hour, gpus=4)
    assert cost["usd_by_time"] == [[0, 1.5, 6.0], [hour, 2.0, 24.0], [2 * hour, 0.0, 0.0]]
    assert cost["usd"] == 30.0


def test_a_price_needs_replicas_that_come_and_go() -> None:
    with pytest.raises(click.UsageError, match="--autoscale"):
        requested_by_command("lockstep simulate --model qwen3-8b --gpu h100 --workload gen:n=5 --replicas 2 --price 1")
