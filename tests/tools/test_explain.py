"""`lockstep explain` reports on a request, a step and the slowest requests exactly the decisions of the core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from lockstep.core.cluster.dispatch import DispatchConfig, Dispatcher
from lockstep.core.cluster.router import EngineShare, RequestEnded, RequestOffered, RouterConfig
from lockstep.core.command import main
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.render import Names
from lockstep.core.scheduler.engine import Engine
from lockstep.host.router_journal import RouterJournal, label_key
from lockstep.sim.results.stored_run import read_run
from lockstep.tools.explain import chronicle_of, explain, measured
from lockstep.tools.journal import journal
from lockstep.tools.narration import sentences, timeline_text
from lockstep.tools.request_timeline import Chronicle, RequestTimeline
from lockstep.tools.runs import clients_ids, find_request
from lockstep.tools.state_at import state_at
from lockstep.tools.timeline_picture import lanes, picture, text_lines
from lockstep.tools.why_step import why_step
from tests.support.fleet.fleet import Fleet
from tests.support.recorded import SCENARIOS, journal_of, record_rank, record_simulation, record_text
from tests.support.routed import raw
from tests.support.scenario import Run, digest_of, parse, play
from tests.support.served import Asked


def run_explain(*arguments: object) -> Result:
    return CliRunner().invoke(explain, [str(argument) for argument in arguments])


def timeline_of(folder: Path, name: str) -> tuple[RequestTimeline, Chronicle, str]:
    """The timeline of a request, all timelines, and its text."""
    request_id = find_request(folder, name)
    chronicle, walk = chronicle_of(folder, [request_id])
    timeline = chronicle.timelines[request_id]
    return timeline, chronicle, "\n".join(timeline_text(timeline, chronicle, walk.names, walk.header.config))


def causes(timeline: RequestTimeline) -> list[tuple[str, int, int, int]]:
    """The causes of the first wait: reason, other request, from, until in ms."""
    spans = timeline.waits[0].spans
    return [(s.cause.reason, s.cause.other, s.start_us // 1000, s.stop_us // 1000) for s in spans]


QUEUE = """# Two run at most: c is the head of the waiting queue, d is behind it.
config page_size=2 pages=64 overlap_depth=0 max_running_requests=2 radix_cache=no

add a prompt=1..4 max_new=4
add b prompt=11..14 max_new=8
step
at 2ms
add c prompt=21..24 max_new=2
add d prompt=31..34 max_new=2
at 5ms
finish
at 8ms
finish
at 11ms
finish
at 14ms
finish
at 20ms
run
"""


def test_waiting_is_shown_with_its_reason_and_what_made_room(tmp_path: Path) -> None:
    folder = record_text(tmp_path, QUEUE)
    c, _, text = timeline_of(folder, "c")
    assert causes(c) == [("launch", -1, 2, 5), ("running_limit", -1, 5, 14)]
    assert [(one.request_id, one.how) for one in c.waits[0].made_room] == [(0, "length")]
    assert "3 ms: it was not refused; the next batch was not planned yet" in text
    assert "9 ms: first in the queue, but max_running_requests (2) ran already" in text
    assert "at the end of this time a ended (length)" in text
    d, _, text = timeline_of(folder, "d")
    assert causes(d)[:2] == [("launch", -1, 2, 5), ("running_limit", 2, 5, 14)]
    assert "9 ms: behind c, which could not start: max_running_requests (2) ran already" in text
    assert "no tokens were cached (the radix cache is off): 4 tokens to compute" in text
    assert "finished (length) with 2 output tokens: its limit of output tokens was reached" in text


def test_shared_prefix_names_the_computing_request_and_what_was_hit(tmp_path: Path) -> None:
    folder = record_text(
        tmp_path,
        """# b waits for the pages that a computes.
config page_size=4 pages=64 prefix_deduplication=defer overlap_depth=0

add a prompt=1..40 max_new=3
add b prompt=1..40,90 max_new=3
step
at 7ms
finish
at 9ms
run
""",
    )
    b, _, text = timeline_of(folder, "b")
    assert causes(b) == [("prefix", 0, 0, 7)]
    assert "7 ms: a was computing the prefix that they share" in text
    assert "40 of 41 tokens were in the radix cache, 1 was left" in text.replace("were left", "was left")


def test_loads_and_prefetches_are_shown(tmp_path: Path) -> None:
    again = """
at 3ms
add c prompt=1..5 max_new=1
step
at 5ms
moved
step
at 6ms
moved
run
"""
    folder = record_text(tmp_path, (SCENARIOS / "tiers" / "storage.txt").read_text().rpartition("\nadd c")[0] + again)
    c, _, text = timeline_of(folder, "c")
    assert causes(c) == [("prefetch", -1, 3, 5), ("load", -1, 5, 6)]
    assert "2 ms: its prefix was being fetched from storage" in text
    assert "1 ms: its prefix was being loaded from host memory to the device" in text


def test_grammar_session_adapter_sample_and_pause_are_shown(tmp_path: Path) -> None:
    grammar = record_text(
        tmp_path / "grammar",
        "# g compiles for 5 ms.\nconfig page_size=2 pages=64 overlap_depth=0\n\nadd a prompt=1..4 max_new=2 grammar=g\n"
        "at 5ms\ngrammar g\nat 6ms\nstep\nrun\n",
    )
    assert causes(timeline_of(grammar, "a")[0]) == [("grammar", -1, 0, 5), ("launch", -1, 5, 6)]
    session = record_text(
        tmp_path / "session",
        "# b waits for a.\nconfig page_size=2 pages=64\n\nopen s\nadd a prompt=1..4 max_new=1 session=s\n"
        "add b prompt=11..12 max_new=1 session=s\nstep\nat 4ms\ncollect\nat 6ms\nstep\nrun\n",
    )
    b, _, text = timeline_of(session, "b")
    assert causes(b) == [("session", 0, 0, 4), ("launch", -1, 4, 6)]
    assert "the previous turn of its session, a, had not ended" in text
    assert "a turn of session s, which kept 5 tokens: 7 in all" in text
    adapter = record_text(
        tmp_path / "adapter",
        "# law is loaded.\nconfig page_size=2 pages=64 overlap_depth=0 max_loras=1\n\nload law\n"
        "add a prompt=1..4 max_new=2 adapter=law\nstep\nat 4ms\nloaded law\nat 5ms\nstep\nrun\n",
    )
    assert causes(timeline_of(adapter, "a")[0])[0][0] == "adapter"
    paused = record_text(
        tmp_path / "paused",
        "# Paused for 9 ms.\nconfig page_size=2 pages=64 overlap_depth=0\n\npause\nadd a prompt=1..4 max_new=2\nstep\n"
        "at 9ms\nresume\nstep\nrun\n",
    )
    assert causes(timeline_of(paused, "a")[0]) == [("paused", -1, 0, 9)]
    samples = record_text(
        tmp_path / "samples",
        "# a.1 waits for a.\nconfig page_size=2 pages=64\n\nadd a prompt=1..8 max_new=2 n=2\nstep\nat 3ms\n"
        "finish\nrun\n",
    )
    assert causes(timeline_of(samples, "a.1")[0])[0][0] in ("sample", "prefix")


def hear_all(fleet: Fleet) -> None:
    for fact in list(fleet.told):
        fleet.tell(fact)


def test_waits_between_engines_are_shown_on_both_sides(tmp_path: Path) -> None:
    """The KV of a prompt takes 4 ms; the decode engine runs one request, so the KV of another waits for a while."""
    common: dict[str, Any] = {"page_size": 2, "pages": 40, "max_running_requests": 1, "num_reserved_decode_tokens": 0}
    fleet = Fleet([SchedConfig(role="prefill", **common)], [SchedConfig(role="decode", **common)])
    for key in range(2):
        fleet.arrive(Asked(key, tuple(range(100 * key, 100 * key + 6)), 4))
    fleet.clock(1_000)
    for _ in range(2):
        hear_all(fleet)
        assert fleet.ready("p0")
        assert fleet.finish("p0")
    fleet.clock(4_000)
    while fleet.movable():
        fleet.move(fleet.movable()[0])
    hear_all(fleet)
    assert fleet.ready("d0")
    fleet.clock(2_000)
    fleet.settle()
    decode = journal_of(fleet, "d0", tmp_path / "d0")
    first, _, text = timeline_of(decode, "r0")
    assert causes(first)[0][0] == "receiving"
    assert "its KV was being transferred" in text
    second, _, text = timeline_of(decode, "r1")
    assert [cause[0] for cause in causes(second)] == ["receiving", "ready"]
    assert "no row, or no slot for its adapter, was free" in text
    prefill, _, text = timeline_of(journal_of(fleet, "p0", tmp_path / "p0"), "r0")
    assert causes(prefill)[0][0] == "bootstrap"
    assert "its decode engine had not allocated pages for it" in text


def test_media_are_listed_content_by_content(tmp_path: Path) -> None:
    folder = record_text(
        tmp_path,
        """# b needs cat, which is being encoded for a, and dog, which waits for the encoder; c finds both.
config page_size=2 pages=64 overlap_depth=0 encoder_budget_tokens=4

add a prompt=1..8 max_new=1 spans=2:5:image:cat:4
at 2ms
add b prompt=11..18 max_new=1 spans=1:3:image:cat:4,4:6:video:dog:4
at 5ms
encoded cat
at 9ms
encoded dog
run
at 20ms
add c prompt=21..28 max_new=1 spans=1:3:image:cat:4,4:6:video:dog:4
run
""",
    )
    cat, dog = digest_of("cat").hex()[:8], digest_of("dog").hex()[:8]
    b, chronicle, text = timeline_of(folder, "b")
    assert causes(b)[0] == ("media", -1, 2, 9)
    assert "7 ms: its media were being encoded" in text
    assert f"image {cat}, 4 tokens: encoded from 0.000 s, for another request, to 0.005 s" in text
    assert f"video {dog}, 4 tokens: encoded from 0.005 s to 0.009 s" in text
    encoder = next(lane for lane in lanes(b, chronicle) if lane.name == "encoder: its media")
    assert encoder.bars == [(2000, 5000), (5000, 9000)]
    c, chronicle, text = timeline_of(folder, "c")
    assert f"image {cat}, 4 tokens: encoded already" in text
    assert all(lane.name != "encoder: its media" for lane in lanes(c, chronicle))


def test_retraction_is_shown_with_the_requests_that_grew(tmp_path: Path) -> None:
    text = (SCENARIOS / "retraction/least_output_first.txt").read_text()
    folder = record_text(tmp_path, text)
    b, _, told_text = timeline_of(folder, "b")
    assert len(b.retractions) == 1
    assert b.retractions[0].gainers == (0,)
    assert (b.retractions[0].event.needed_pages, b.retractions[0].event.available_pages) == (2, 1)
    assert "did not fit into the pages left (2 needed, 1 left)" in told_text
    why = why_step(folder, b.retractions[0].step).parts["why"]
    assert any("the next decodes need 2 and 1 were available" in line for line in why)
    assert "after 6 output tokens: the next decode of the running batch did not fit into the pages left" in told_text
    assert "4 pages freed" in told_text
    assert "the decodes of a opened pages in the same step" in told_text
    assert "waited again" in told_text or "was admitted again at once" in told_text
    assert "computed its prompt and the output it had kept: 9 tokens in 1 chunk" in told_text


def test_preemption_names_the_beneficiary(tmp_path: Path) -> None:
    folder = record_text(tmp_path, (SCENARIOS / "preemption/makes_room.txt").read_text())
    assert "c has a higher priority and needed the pages" in timeline_of(folder, "b")[2]


@pytest.mark.parametrize(
    "path", sorted(SCENARIOS.glob("[!c]*/*.txt"))[::4], ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_every_timeline_adds_up(path: Path, tmp_path: Path) -> None:
    """For each request of many scenarios: spans tile its waits, and the narration of a timeline is complete."""
    run = Run()
    play(parse(path.read_text()), run)
    engine, names = Engine(run.config), Names()
    request_ids = range(run.next_request + 40)
    chronicle = Chronicle(request_ids)
    for number, event in enumerate(run.events):
        step = engine.step(event)
        names.observe(event)
        chronicle.observe(number, event, step, engine)
    chronicle.close()
    ended = {decided.request_id for decided in run.decisions if type(decided).__name__ == "RequestFinished"}
    for request_id, timeline in chronicle.timelines.items():
        for wait in timeline.waits:
            assert wait.stop_us >= wait.start_us
            assert wait.spans or wait.took_us == 0
            assert sum(span.stop_us - span.start_us for span in wait.spans) == wait.took_us
        assert (timeline.finished is not None) == (request_id in ended)
        narration = sentences(timeline, chronicle, names, run.config)
        assert narration[-1].kind == "ended"
        assert sum(sentence.text.startswith("first token") for sentence in narration) == bool(timeline.messages)
        ElementTree.fromstring(picture(timeline, chronicle))
        text_lines(timeline, chronicle)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More requests than fit: waits, chunks and retractions."""
    return record_simulation(
        tmp_path_factory.mktemp("crowd"),
        "gen:n=60,rate=400,shared_prefix=64x2,input=lognormal:200:0.8,output=lognormal:60:0.8,max_total=900",
        pages=90, max_running_requests=12, chunked_prefill_size=128, overlap_depth=1, bypass_limit=8,
    )  # fmt: skip


def test_timelines_measure_what_metrics_measure(crowd: Path) -> None:
    requests = measured(crowd)
    ids = requests.request_id.tolist()
    chronicle, _ = chronicle_of(crowd, ids)
    timelines = [chronicle.timelines[request_id] for request_id in ids]
    assert [timeline.queue_us for timeline in timelines] == requests.queue_us.tolist()
    assert [timeline.ttft_us for timeline in timelines] == requests.ttft_us.tolist()
    assert [timeline.e2e_us for timeline in timelines] == requests.e2e_us.tolist()
    assert [len(timeline.retractions) for timeline in timelines] == requests.retractions.tolist()
    assert sum(requests.retractions) > 0
    for timeline in timelines:
        computed = sum(work.stop - work.start for work in timeline.works if work.stay == 0 and work.extends)
        assert timeline.waits[0].admitted is not None
        assert computed == timeline.waits[0].admitted.new_tokens or timeline.retractions


def test_narrations_are_in_order_of_time(crowd: Path) -> None:
    """With overlap a decode is launched before its token is there."""
    chronicle, walk = chronicle_of(crowd, measured(crowd).request_id.tolist())
    for timeline in chronicle.timelines.values():
        times = [sentence.time_us for sentence in sentences(timeline, chronicle, walk.names, walk.header.config)]
        assert times == sorted(times)


def test_slowest_are_the_slowest_and_their_waits_are_added_up(crowd: Path, tmp_path: Path) -> None:
    result = run_explain(crowd, "--slowest", "ttft", 5, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["requests"]
    times = [one["ttft_us"] for one in found]
    assert times == sorted(measured(crowd).ttft_us.tolist(), reverse=True)[:5]
    for one in found:
        assert sum(one["waited_us_by_cause"].values()) == sum(w["stop_us"] - w["start_us"] for w in one["waits"])
    page = tmp_path / "slow.html"
    result = run_explain(crowd, "--slowest", "itl", 3, "--html", page)
    assert result.exit_code == 0, result.output
    assert "what they waited for" in result.stdout
    text = page.read_text()
    assert text.count("<svg") == 3
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert run_explain(crowd, "--slowest", "itl", 3, "--html", page).exit_code == 2


def test_step_lists_admitted_and_left_out_requests(tmp_path: Path) -> None:
    folder = record_text(tmp_path, QUEUE)
    reason = why_step(folder, 6)
    assert reason.title == "step 6 at 0.005 s: LaneReady, launched b1"
    assert reason.parts["before"][:2] == ["2 waiting: c and d", "2 decoding: a and b"]
    assert reason.parts["launched"][0] == "2 decodes: a and b"
    assert reason.parts["why"] == ["only decodes: no waiting request could start (left out, below)"]
    assert reason.parts["left out"] == [
        "c: first in the queue: max_running_requests (2) ran already",
        "d: behind c, which could not start: max_running_requests (2) ran already",
    ]
    assert "batch b0 finished" in why_step(folder, 5).parts["the fact"]


def test_every_step_of_a_crowded_run_can_be_explained(crowd: Path) -> None:
    chronicle, _ = chronicle_of(crowd, [20])
    admitted = chronicle.timelines[20].waits[0].admitted_step
    assert any("r20 was admitted" in line for line in why_step(crowd, admitted).parts["why"])
    reasons = " ".join(str(why_step(crowd, number).parts) for number in range(0, 400, 23))
    for words in ("left out", "of page tables change", "become free once all batches in flight"):
        assert words in reasons


def test_nothing_asked_unknown_request_and_cluster_are_refused_with_a_hint(crowd: Path, tmp_path: Path) -> None:
    assert "Give one of --request" in run_explain(crowd).output
    result = run_explain(crowd, "--request", "nobody")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "got `nobody`" in result.stderr
    assert "60 requests arrived" in result.stderr
    assert "must be below" in run_explain(crowd, "--step", 10**6).stderr
    (tmp_path / "engines/0").mkdir(parents=True)
    (tmp_path / "engines/0/journal").symlink_to(crowd / "journal")
    assert "name one of them, such as" in run_explain(tmp_path, "--step", 0).stderr
    assert run_explain(tmp_path / "engines/0", "--step", 0).exit_code == 0
    assert run_explain(tmp_path, "--request", "r0").stdout == run_explain(crowd, "--request", "r0").stdout
    assert "got `nobody`" in run_explain(tmp_path, "--request", "nobody").stderr
    (tmp_path / "engines/1").mkdir()
    (tmp_path / "engines/1/journal").symlink_to(crowd / "journal")
    assert "is the name of a request of each of the engines 0, 1" in run_explain(tmp_path, "--request", "r0").stderr
    assert run_explain(tmp_path / "nothing", "--step", 0).exit_code == 2


def test_requests_that_left_the_routers_queue_never_reached_an_engine(crowd: Path, tmp_path: Path) -> None:
    for engine in ("0", "1"):
        (tmp_path / "engines" / engine).mkdir(parents=True)
        (tmp_path / "engines" / engine / "journal").symlink_to(crowd / "journal")

    def hint() -> str:
        result = run_explain(tmp_path, "--request", "left")
        assert (result.exit_code, result.stdout) == (2, "")
        return result.stderr

    def record(*, ends: int) -> None:
        """Two run and two more may wait of five that arrive; the longest waiting one ends, and then a running one."""
        shares = (EngineShare(), EngineShare())
        config, line = RouterConfig(), DispatchConfig(open_max=1, waiting_max=2)
        router = Dispatcher(line, config, shares)
        facts: list[Any] = [RequestOffered(time_us=n, request_id=n, prompt_tokens=10) for n in range(5)]
        facts += [RequestEnded(time_us=9, request_id=n) for n in (2, 0)[:ends]]
        labels = ["a", "b", "gone\x1b", "d", "full"]
        with RouterJournal(tmp_path, config, shares, line, bytes_max=10**6) as journal:
            for fact in facts:
                decided = router.step(fact)
                label = label_key(labels[fact.request_id], "") if isinstance(fact, RequestOffered) else ""
                journal.append_decided(fact, decided, router.digest, label)

    assert "120 requests arrived" in hint()  # at both engines
    record(ends=0)
    assert "1 request was cancelled or rejected in the router's queue and never reached an engine" in hint()
    record(ends=2)
    assert "3 requests were cancelled or rejected in the router's queue" in hint()  # of both segments
    assert "got `left`" in hint()
    with (tmp_path / "router/00000001.log").open("ab") as file:
        file.write(b"\xf5LJ")  # the server was killed
    assert "3 requests were cancelled" in hint()
    result = run_explain(tmp_path, "--request", "gone\x1b")
    assert result.exit_code == 0, result.output
    assert "request gone\\x1b arrived at the router at" in result.stdout
    assert "with 10 prompt tokens, and was cancelled in the router's queue 7 µs later. It never reached" in words(
        result.stdout
    )
    assert "was rejected because the queue was full 0 µs later" in words(
        run_explain(tmp_path, "--request", "full").stdout
    )
    said = json.loads(run_explain(tmp_path, "--request", "full", "--json").stdout)
    assert (said["left_in_queue"]["label"], said["left_in_queue"]["reason"], said["waited_us"]) == (
        "full",
        "line_full",
        0,
    )
    assert (
        "it has no timeline\nhint: leave out --html"
        in run_explain(tmp_path, "--request", "full", "--html", tmp_path / "page.html").stderr
    )
    assert b"label" in raw(tmp_path)
    assert b"full" not in raw(tmp_path).replace(b"line_full", b"")  # labels cannot be read there


def words(text: str) -> str:
    return " ".join(text.split())


def test_numbers_are_those_of_the_table_also_where_engines_have_others(tmp_path: Path) -> None:
    """With a queue before the router engines number requests in the order of sending."""
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": at, "input_length": 90, "output_length": 30, "hash_ids": [at]} for at in range(30)]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    mix = ["--workload", f"a={trace}", "--workload", f"b={trace}"]  # with turns in another order than that of arrival
    words_of = ["simulate", "--model", "qwen3-0.6b", "--gpu", "h200", *mix, "--replicas", "2", "--no-intervals"]
    words_of += [
        "--admission",
        "open=2,waiting=5,share.a=4",
        "--no-report",
        "--no-trace",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(words_of) == 0
    requests = read_run(tmp_path / "run").requests
    assert requests is not None
    turned_away = requests["finish_reason"] == "rejected_queue_full"
    assert 0 < turned_away.sum() < 60
    for number, label, tenant, away in zip(
        requests["request_id"], requests["label"], requests["tenant"], turned_away, strict=True
    ):
        narration = json.loads(run_explain(tmp_path / "run", "--request", str(number), "--json").stdout)
        if away:
            assert narration["left_in_queue"]["request_id"] == number
            assert narration["left_in_queue"]["tenant"] == tenant
        else:
            assert (narration["label"], narration["tenant"]) == (label, tenant)
    name = str(requests["label"][turned_away][0])
    assert "never reached an engine" in words(run_explain(tmp_path / "run", "--request", name).stdout)


def test_a_label_cannot_give_a_terminal_orders(tmp_path: Path) -> None:
    """A journal may contain such labels: earlier writers did not refuse them."""
    label = "c\x1b[31m\x07\x7f\x9b2J\u202ed"
    seen = "c\\x1b[31m\\x07\\x7f\\x9b2J\\u202ed"
    folder = record_text(tmp_path, QUEUE.replace("add c ", f"add {label} "))
    page = tmp_path / "page.html"
    for asked in (("--request", "r2"), ("--request", label), ("--slowest", "ttft", 3), ("--step", 3)):
        for more in ((), ("--json",)):
            said = run_explain(folder, *asked, *more)
            assert said.exit_code == 0, said.output
            assert not [one for one in said.stdout if one in label[1:] and not one.isprintable()]
            if not more:
                assert seen in said.stdout
    assert (
        json.loads(run_explain(folder, "--request", "r2", "--json").stdout)["label"] == label
    )  # machine-readable output has all of it
    assert f"behind {seen}, which could not start" in run_explain(folder, "--request", "d").stdout
    run_explain(folder, "--request", "r2", "--html", page)
    assert label not in page.read_text()
    assert seen in page.read_text()
    for kind in ((), ("--jsonl",)):
        dumped = CliRunner().invoke(journal, ["dump", str(folder), *kind])
        assert dumped.exit_code == 0
        assert all(one.isprintable() or one == "\n" for one in dumped.stdout)


def test_lanes_name_what_ran_without_it(crowd: Path) -> None:
    chronicle, _ = chronicle_of(crowd, [find_request(crowd, "r0")])
    kinds = [lane.kind for lane in lanes(chronicle.timelines[0], chronicle)]
    assert kinds[-1] == "token"
    assert "prefill" in kinds


def test_rank_reports_that_it_proposed_and_what_all_agreed_on(tmp_path: Path) -> None:
    folder = record_rank(tmp_path / "journal")
    texts = []
    for step in ("12", "16"):
        result = CliRunner().invoke(explain, [str(folder), "--step", step])
        assert result.exit_code == 0, result.output
        texts.append(result.stdout)
    assert "the plan is proposed, and launched once all ranks have agreed" in texts[0]
    assert "this step launches the batch on which all ranks agreed" in texts[1]
    result = CliRunner().invoke(explain, [str(folder), "--request", "3"])
    assert result.exit_code == 0, result.output


# -------------------------------------------------------------------------------------------------- the state at a step

STOPPED = """# The prompt of b is split, c and d wait behind it.
config page_size=2 pages=64 overlap_depth=1 max_running_requests=2 radix_cache=no chunked_prefill_size=6

add a prompt=1..4 max_new=4
add b prompt=11..24 max_new=8
step
step
at 2ms
add c prompt=21..24 max_new=2
add d prompt=31..34 max_new=2
at 5ms
finish
"""


def test_the_state_at_the_end_has_phases_tokens_pages_and_batches(tmp_path: Path) -> None:
    folder = record_text(tmp_path, STOPPED)
    result = run_explain(folder, "--at", "end", "--json")
    assert result.exit_code == 0, result.output
    state = json.loads(result.stdout)
    columns = ("phase", "prompt_tokens", "computed_tokens", "in_flight_tokens", "emitted_tokens", "pages")
    assert {one["label"]: tuple(one[name] for name in columns) for one in state["requests"]} == {
        "a": ("decode", 4, 4, 0, 1, 2),
        "b": ("prefill", 14, 2, 12, 0, 7),
        "c": ("waiting", 4, 0, 0, 0, 0),
        "d": ("waiting", 4, 0, 0, 0, 0),
    }
    assert [(one["batch_id"], one["launched_us"]) for one in state["in_flight"]] == [(1, 0), (2, 5000)]
    text = run_explain(folder, "--at", "end").output
    assert "4 open requests: 1 in decode, 1 in prefill, 2 waiting" in text
    assert "behind c, which could not start: max_running_requests (2) ran already" in text
    assert "launched and without a result: b2" in text
    assert "last result: b0, at 0.005 s" in text
    assert "  it was closed\n" in text


def test_the_state_before_a_step_is_that_of_the_run(tmp_path: Path) -> None:
    folder = record_text(tmp_path, STOPPED)
    state = json.loads(run_explain(folder, "--at", "3", "--json").stdout)
    assert (state["step"], [one["label"] for one in state["requests"]]) == (3, ["a", "b"])
    assert (state["last_result"], state["ending"]) == ("", [])
    assert json.loads(run_explain(folder, "--at", "0", "--json").stdout)["requests"] == []


@pytest.mark.parametrize(("at", "why"), [("99", "must be at most 8"), ("now", "must be end or the number of a step")])
def test_a_state_at_no_step_is_refused(at: str, why: str, tmp_path: Path) -> None:
    result = run_explain(record_text(tmp_path, STOPPED), "--at", at)
    assert result.exit_code == 2
    assert why in result.output


def test_the_state_at_every_step_adds_up(crowd: Path) -> None:
    """Requests are open from their arrival to their end; emitted tokens are those of their messages."""
    chronicle, walk = chronicle_of(crowd, list(range(10_000)))
    for at in range(0, 400, 37):
        state = state_at(crowd, str(at))
        expected = {
            one.request_id: sum(m.tokens for m in one.messages if m.time_us <= state.time_us)
            for one in chronicle.timelines.values()
            if one.arrived_step < at and not 0 <= one.ended_step < at
        }
        assert {one.request_id: one.emitted_tokens for one in state.requests} == expected
        page = walk.header.config.page_size
        for one in state.requests:
            assert one.shared_pages <= one.pages == -(-(one.computed_tokens + one.in_flight_tokens) // page)


def test_the_ids_of_vllm_have_the_names_of_its_clients() -> None:
    assert clients_ids("cmpl-mine-0-1a2b3c4d") == {"cmpl-mine-0", "cmpl-mine", "mine-0", "mine"}
    assert clients_ids("chatcmpl-a-7-1a2b3c4d") == {"chatcmpl-a-7", "a-7"}
    assert clients_ids("2_chatcmpl-ab-1a2b3c4d") == {"chatcmpl-ab", "ab"}
    assert clients_ids("17-1a2b3c4d") == {"17"}
    assert clients_ids("my-own") == {"my-own"}
