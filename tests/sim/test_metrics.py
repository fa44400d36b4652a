"""Metrics: every definition by hand on a run small enough to draw, then against a token-by-token reference."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.contract.commands import BatchPlan, Command, LaunchBatch, Mode, Step, StreamTokens
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import (
    AdmissionDeferred,
    BatchFinished,
    Decided,
    DecodeSkipped,
    FinishReason,
    LaneReady,
    PagesEvicted,
    RejectReason,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestRejected,
    RequestRetracted,
    TokenDigest,
    TokenIds,
    TokenRuns,
)
from lockstep.sim.metrics import fold as fold_module
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.messages import count_tokens
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.metrics.series import BINS_MAX
from lockstep.sim.metrics.slo import Slo


def int32s(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int32)


class Run:
    """Passes events to a fold, one short line per event."""

    def __init__(self, *, kv_pages: int | None = None) -> None:
        self.fold = MetricsFold(kv_pages=kv_pages)

    def decide(self, *decided: Decided) -> None:
        self.fold.observe(LaneReady(decided[0].time_us), Step(decided=list(decided)))

    def arrive(self, time_us: int, request_id: int, prompt_tokens: int = 10, tenant: str = "") -> None:
        prompt, label = TokenRuns((0, prompt_tokens)), f"q{request_id}"
        event = RequestArrived(
            time_us=time_us, request_id=request_id, prompt=prompt, max_new_tokens=9, label=label, tenant=tenant
        )
        self.fold.observe(event, Step())

    def admit(self, time_us: int, request_id: int, cached_tokens: int = 0) -> None:
        self.decide(RequestAdmitted(time_us, request_id, 0, cached_tokens, 1, 0))

    def retract(self, time_us: int, request_id: int) -> None:
        self.decide(RequestRetracted(time_us, request_id, 1, 2, 3, "pages"))

    def stream(self, time_us: int, messages: Mapping[int, tuple[int, int]]) -> None:
        """`messages` maps request ids to (offset, tokens)."""
        offsets, counts = int32s(m[0] for m in messages.values()), int32s(m[1] for m in messages.values())
        command = StreamTokens(np.array(list(messages), np.int64), offsets, counts, int32s(range(counts.sum())))
        self.fold.observe(BatchFinished(time_us, 0), Step(commands=[command]))

    def finish(self, time_us: int, request_id: int, reason: FinishReason = "length") -> None:
        self.decide(RequestFinished(time_us, request_id, reason, 0, 0))

    def reject(self, time_us: int, request_id: int, reason: RejectReason) -> None:
        self.decide(RequestRejected(time_us, request_id, reason, "no"))

    def answer(self, request_id: int, arrival_us: int, token_times_us: Sequence[int]) -> None:
        """A request alone: it arrives, streams one token at each time, and finishes with the last."""
        self.arrive(arrival_us, request_id)
        for offset, time_us in enumerate(token_times_us):
            self.stream(time_us, {request_id: (offset, 1)})
        self.finish(token_times_us[-1], request_id)

    def batch(
        self, batch_id: int, start_us: int, stop_us: int, spans: Sequence[tuple[int, int]] = ((9, 10),),
        mode: Mode = "decode", extend_rows: int = 0, launched_us: int | None = None,
    ) -> None:  # fmt: skip
        self.launch(batch_id, start_us if launched_us is None else launched_us, spans, mode, extend_rows)
        self.fold.observe(BatchFinished(stop_us, batch_id, b"", start_us, stop_us), Step())

    def launch(
        self, batch_id: int, time_us: int, spans: Sequence[tuple[int, int]], mode: Mode, extend_rows: int = 0
    ) -> None:
        rows = int32s(range(len(spans)))
        starts, stops = int32s(start for start, _ in spans), int32s(stop for _, stop in spans)
        plan = BatchPlan(
            batch_id=batch_id, mode=mode, rows=rows, request_ids=rows.astype(np.int64), starts=starts, stops=stops,
            extend_rows=extend_rows,
        )  # fmt: skip
        self.fold.observe(LaneReady(time_us), Step(commands=[LaunchBatch(plan)]))

    def result(self, *slos: str) -> RunData:
        return self.fold.result([Slo.parse(slo) for slo in slos])


# ------------------------------------------------------------------------------------------------------ the latencies


def test_one_request_drawn_by_hand() -> None:
    # 100 arrives, 150 admitted, tokens at 300, 320 and 360.
    run = Run()
    run.arrive(100, 7, prompt_tokens=10, tenant="acme")
    run.admit(150, 7, cached_tokens=4)
    run.stream(300, {7: (0, 1)})
    run.stream(320, {7: (1, 1)})
    run.stream(360, {7: (2, 1)})
    run.finish(360, 7, "stop")
    data = run.result()

    row = {name: column[0] for name, column in data.requests.columns().items()}
    assert row == {
        "request_id": 7, "arrival_us": 100, "queue_us": 50, "ttft_us": 200, "tpot_us": 30.0, "itl_us_max": 40.0,
        "e2e_us": 260, "ended_us": 360, "prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 3, "retractions": 0,
        "finish_reason": "stop", "label": "q7", "tenant": "acme",
    }  # fmt: skip
    assert data.itl_us.expand().tolist() == [20.0, 40.0]
    latency = data.summary["latency"]
    assert (latency["ttft_us_p99"], latency["itl_us_mean"], latency["tpot_us_p50"]) == (200.0, 30.0, 30.0)
    assert data.span_us == (100, 360)


def test_tokens_of_one_message_share_its_gap() -> None:
    run = Run()
    run.arrive(0, 1)
    run.stream(100, {1: (0, 2)})  # the second token of the first message has no gap
    run.stream(160, {1: (2, 3)})  # 60 us for 3 tokens
    run.stream(170, {1: (5, 1)})
    run.finish(170, 1)
    data = run.result()
    assert data.itl_us.expand().tolist() == [10.0, 20.0, 20.0, 20.0]
    assert data.requests.tpot_us.tolist() == [70 / 5]
    assert data.requests.output_tokens.tolist() == [6]


def test_an_answer_in_one_message_has_no_tpot() -> None:
    run = Run()
    run.answer(1, 0, [50])
    run.arrive(0, 2)
    run.stream(80, {2: (0, 5)})
    run.finish(80, 2)
    data = run.result()
    assert np.isnan(data.requests.tpot_us).all()
    assert data.summary["latency"]["tpot_us_p50"] is None
    assert data.summary["latency"]["itl_us_max"] is None
    assert data.summary["throughput"]["output_tokens"] == 6


def test_tokens_sent_again_after_a_restart_count_once_and_when_first_seen() -> None:
    run = Run()
    run.arrive(0, 1)
    run.arrive(0, 2)
    run.stream(100, {1: (0, 2), 2: (0, 1)})
    run.stream(200, {1: (0, 1)})  # no new token
    run.stream(300, {1: (1, 3)})  # output 1 was sent before; 2 and 3 are new
    run.stream(310, {2: (1, 1)})
    run.finish(310, 1)
    run.finish(310, 2)
    data = run.result()
    assert data.requests.output_tokens.tolist() == [4, 2]
    assert data.itl_us.expand().tolist() == [100.0, 100.0, 210.0]
    assert data.requests.ttft_us.tolist() == [100, 100]


def test_percentiles_lie_between_neighbours_as_numpy_draws_them() -> None:
    run = Run()
    for request_id, first_us in enumerate((10, 20, 30, 40)):
        run.answer(request_id, 1000 * request_id, [1000 * request_id + first_us])
    latency = run.result().summary["latency"]
    assert latency["ttft_us_p50"] == 25.0
    assert latency["ttft_us_p90"] == 37.0
    assert latency["ttft_us_p99"] == 39.7
    assert (latency["ttft_us_mean"], latency["ttft_us_min"], latency["ttft_us_max"]) == (25.0, 10.0, 40.0)


def test_latencies_are_those_of_completed_requests_and_columns_hold_the_rest() -> None:
    run = Run()
    run.answer(1, 0, [10, 20])
    run.arrive(0, 2)
    run.stream(500, {2: (0, 1)})
    run.stream(900, {2: (1, 1)})
    run.finish(900, 2, "cancelled")
    data = run.result()
    assert data.requests.ttft_us.tolist() == [10, 500]
    assert data.requests.e2e_us.tolist() == [20, 900]
    assert data.summary["latency"]["ttft_us_max"] == 10.0
    assert data.itl_us.expand().tolist() == [10.0]
    assert data.summary["throughput"]["output_tokens"] == 2


def test_queue_time_ends_with_the_first_admission() -> None:
    run = Run()
    run.arrive(0, 1)
    run.admit(30, 1, cached_tokens=4)
    run.retract(60, 1)
    run.admit(90, 1, cached_tokens=8)
    run.finish(200, 1)
    data = run.result()
    assert data.requests.queue_us.tolist() == [30]
    assert data.requests.cached_tokens.tolist() == [4]
    assert data.requests.retractions.tolist() == [1]


# --------------------------------------------------------------------------------------------- counts, rates, cache


def test_requests_are_counted_by_how_they_ended() -> None:
    run = Run()
    for request_id in range(8):
        run.arrive(request_id, request_id)
    run.finish(20, 0, "stop")
    run.finish(20, 1, "length")
    run.finish(20, 2, "cancelled")
    run.finish(20, 3, "timeout")
    run.reject(20, 4, "too_long")
    run.reject(20, 5, "queue_full")
    run.reject(20, 6, "queue_full")
    data = run.result()
    assert data.summary["requests"] == {
        "arrived": 8, "completed": 2, "failed": 4, "cancelled": 1, "rejected": 3, "rejected_too_long": 1,
        "unfinished": 1, "by_finish_reason": {"cancelled": 1, "length": 1, "stop": 1, "timeout": 1},
        "by_reject_reason": {"queue_full": 2, "too_long": 1},
    }  # fmt: skip
    assert data.requests.e2e_us.tolist() == [20, 19, 18, 17, -1, -1, -1, -1]
    assert data.requests.ended_us.tolist() == [20] * 7 + [-1]
    assert data.requests.finish_reason[4] == "rejected_too_long"


def test_rates_run_from_first_arrival_to_last_finish() -> None:
    run = Run()
    run.answer(1, 1_000_000, [1_500_000, 2_000_000])
    run.answer(2, 2_000_000, [2_500_000, 3_000_000])
    run.arrive(3_000_000, 3)
    run.reject(9_000_000, 3, "deadline")  # nothing finished after 3 s
    throughput = run.result().summary["throughput"]
    assert throughput["makespan_us"] == 2_000_000
    assert throughput["requests_per_s"] == 1.0
    assert throughput["output_tokens_per_s"] == 2.0
    assert throughput["total_tokens_per_s"] == 12.0  # and two prompts of 10
    assert throughput["goodput_requests_per_s"] is None  # without SLOs it is absent


def test_goodput_counts_requests_that_meet_every_slo() -> None:
    run = Run()
    run.answer(1, 0, [100, 110, 120])  # ttft 100, tpot 10: good
    run.answer(2, 0, [300, 310, 320])  # first token too late
    run.answer(3, 0, [100, 200, 300])  # too slow afterwards
    run.answer(4, 0, [100])  # one token: no tpot to miss
    run.arrive(0, 5)
    run.finish(1_000_000, 5, "error")  # not completed
    throughput = run.result("ttft_p99=200us", "tpot=50us").summary["throughput"]
    assert throughput["good_requests"] == 2
    assert throughput["goodput_requests_per_s"] == 2.0
    assert throughput["goodput_share"] == 0.4


def test_goodput_under_itl_looks_at_the_longest_gap() -> None:
    run = Run()
    run.answer(1, 0, [100, 110, 200])
    run.answer(2, 0, [100, 150, 200])
    assert run.result("itl=80us").summary["throughput"]["good_requests"] == 1


def test_hit_ratio_is_of_admitted_prompts() -> None:
    run = Run()
    run.arrive(0, 1, prompt_tokens=100)
    run.arrive(0, 2, prompt_tokens=60)
    run.arrive(0, 3, prompt_tokens=1000)
    run.admit(1, 1, cached_tokens=0)
    run.admit(1, 2, cached_tokens=40)
    run.reject(1, 3, "too_long")
    run.decide(PagesEvicted(2, 5, "admission"), PagesEvicted(2, 3, "decode"), PagesEvicted(2, 1, "decode"))
    assert run.result().summary["cache"] == {
        "prompt_tokens_admitted": 160, "prompt_tokens_cached": 40, "hit_ratio": 0.25, "pages_evicted": 9,
        "pages_evicted_by_reason": {"admission": 5, "decode": 4},
    }  # fmt: skip


def test_the_scheduler_s_decisions_are_counted() -> None:
    run = Run()
    run.arrive(0, 1)
    run.admit(0, 1)
    run.retract(5, 1)
    run.retract(9, 1)
    run.decide(AdmissionDeferred(9, 1, "pages"), DecodeSkipped(9, 4, 4), DecodeSkipped(9, 4, 4))
    scheduler = run.result().summary["scheduler"]
    assert (scheduler["retractions"], scheduler["requests_retracted"], scheduler["tokens_discarded"]) == (2, 1, 6)
    assert (scheduler["decodes_skipped"], scheduler["admissions_deferred_by_reason"]) == (2, {"pages": 1})


@pytest.mark.parametrize("prompt", [TokenIds(int32s(range(3)).tobytes()), TokenRuns((5, 2, 9, 1)), TokenDigest(3, b"")])
def test_prompts_of_every_form_are_counted(prompt: TokenIds | TokenRuns | TokenDigest) -> None:
    assert count_tokens(prompt) == 3


# ---------------------------------------------------------------------------------------------------------------- slo


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft_p99=500ms", Slo("ttft", 99.0, 500_000)),
        ("tpot_p50 = 40 ms", Slo("tpot", 50.0, 40_000)),
        ("e2e_p90=30s", Slo("e2e", 90.0, 30_000_000)),
        ("itl_p99.9=2500us", Slo("itl", 99.9, 2_500)),
        ("ttft=0.5s", Slo("ttft", None, 500_000)),
    ],
)
def test_slos_are_read_and_written(text: str, expected: Slo) -> None:
    assert Slo.parse(text) == expected
    assert Slo.parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft_p99", "there is no `=`"),
        ("latency_p99=5s", "unknown metric `latency`"),
        ("ttft_avg=5s", "unknown statistic `avg`"),
        ("ttft_p100=5s", "unknown statistic `p100`"),
        ("ttft_=5s", "unknown statistic ``"),
        ("ttft_p99=500", "`500` has no unit"),
        ("ttft_p99=5min", "unknown unit `min`"),
        ("ttft_p99=fast", "`fast` is not a duration"),
        ("ttft_p99=-5ms", "`-5ms` is not a duration"),
        ("ttft_p99=0ms", "less than one microsecond"),
        ("ttft_p99=", "`` is not a duration"),
    ],
)
def test_an_unreadable_slo_names_the_bad_part(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Slo.parse(text)
    assert said in str(caught.value)
    assert text in str(caught.value)
    assert "\nhint: " in str(caught.value)


def test_an_slo_holds_up_to_its_bound() -> None:
    run = Run()
    for request_id, first_us in enumerate((10, 20, 30, 40)):
        run.answer(request_id, 0, [first_us])
    data = run.result()
    assert data.measured_us(Slo("ttft", 50.0, 1)) == 25.0
    assert data.meets(Slo("ttft", 50.0, 25))
    assert not data.meets(Slo("ttft", 50.0, 24))
    assert data.meets(Slo("ttft", None, 40))  # without a percentile the SLO is about every request
    assert not data.meets(Slo("ttft", None, 39))
    assert data.measured_us(Slo("tpot", 99.0, 1)) is None
    assert data.meets(Slo("tpot", 99.0, 1)) is None  # without data there is no verdict


def test_a_failed_request_is_infinitely_late() -> None:
    run = Run()
    for request_id in range(100):
        run.answer(request_id, 0, [10])
    assert run.result().meets(Slo("ttft", 99.0, 10))
    run.arrive(0, 100)
    run.reject(1, 100, "too_long")  # an error of the client
    assert run.result().meets(Slo("ttft", None, 10))
    run.arrive(0, 101)
    run.reject(1, 101, "queue_full")  # 101 requests: the 99th percentile is the 100th of them
    data = run.result("ttft_p99=10us", "ttft=10us", "itl_p99=1us")
    assert [slo["met"] for slo in data.summary["slos"]] == [True, False, None]
    assert data.measured_us(Slo("ttft", None, 10)) == math.inf
    assert data.summary["slos"][1]["measured_us"] is None
    run.arrive(20, 102)  # never answered
    assert not run.result().meets(Slo("ttft", 99.0, 10))
    assert not run.result().meets(Slo("tpot", 99.0, 10))


# ------------------------------------------------------------------------------------------------- device and series


def test_bubbles_are_idle_time_while_a_request_is_open() -> None:
    # open    0 .......... 100           200 ..... 300      two requests with a gap between them
    # device     20 .. 60 70 ... 110         230 .. 290     a discarded batch outlives the first by 10
    run = Run()
    run.arrive(0, 1)
    run.batch(1, 20, 60, mode="extend", extend_rows=1)
    run.batch(2, 70, 110)
    run.finish(100, 1)
    run.arrive(200, 2)
    run.batch(3, 230, 290)
    run.finish(300, 2)
    device = run.result().summary["device"]
    assert device["batches_by_mode"] == {"decode": 2, "extend": 1}
    assert device["busy_us"] == 140
    assert device["busy_fraction"] == round(140 / 300, 6)
    assert device["bubble_us"] == 20 + 10 + 30 + 10
    assert device["bubble_share"] == 70 / 200


def test_busy_time_after_the_last_finish_is_outside_the_makespan() -> None:
    run = Run()
    run.arrive(0, 1)
    run.batch(1, 0, 150)
    run.finish(100, 1)
    assert run.result().summary["device"]["busy_fraction"] == 1.0


def test_decode_gaps_lie_between_two_decodes_in_a_row() -> None:
    run = Run()
    run.arrive(0, 1)
    run.batch(1, 0, 100)
    run.batch(2, 104, 200)  # gap 4
    run.batch(3, 250, 300, mode="extend", extend_rows=1)
    run.batch(4, 350, 400)  # follows an extend
    run.batch(5, 400, 500)  # gap 0
    run.batch(6, 490, 600)  # overlaps: gap 0
    device = run.result().summary["device"]
    assert device["decode_gap_us_max"] == 4.0
    assert device["decode_gap_us_p50"] == 0.0
    assert device["decode_gap_share"] == round(4 / (4 + 96 + 100 + 110), 6)


def test_overlapping_batches_keep_the_device_busy_once() -> None:
    run = Run()
    run.arrive(0, 1)
    run.batch(1, 0, 100)
    run.batch(2, 50, 80)
    run.batch(3, 90, 120)
    run.finish(120, 1)
    device = run.result().summary["device"]
    assert (device["busy_us"], device["busy_fraction"], device["bubble_us"]) == (120, 1.0, 0)


def test_batches_in_columns() -> None:
    run = Run()
    run.arrive(0, 1)
    run.batch(1, 5, 9, [(0, 8), (4, 6), (10, 11)], mode="mixed", extend_rows=2, launched_us=2)
    run.batch(2, 9, 12, [(8, 12), (6, 10)], mode="verify")
    run.batch(3, 12, 13, [], mode="idle")
    run.launch(4, 14, [(8, 9)], "decode")
    columns = {name: column.tolist() for name, column in run.result().batches.columns().items()}
    assert columns == {
        "batch_id": [1, 2, 3, 4], "mode": ["mixed", "verify", "idle", "decode"], "launched_us": [2, 9, 12, 14],
        "started_us": [5, 9, 12, -1], "finished_us": [9, 12, 13, -1], "rows": [3, 2, 0, 1],
        "new_tokens": [11, 8, 0, 1], "prefill_tokens": [10, 0, 0, 0], "kv_tokens": [25, 22, 0, 9],
    }  # fmt: skip


def test_a_host_without_device_times_has_no_busy_fraction() -> None:
    run = Run()
    run.arrive(0, 1)
    run.launch(1, 5, [(0, 4)], "extend", 1)
    run.fold.observe(BatchFinished(9, 1), Step())
    run.finish(9, 1)
    device = run.result().summary["device"]
    assert (device["batches"], device["busy_fraction"], device["bubble_share"]) == (1, None, None)


def test_levels_are_means_by_time() -> None:
    run = Run(kv_pages=100)
    run.arrive(0, 1)
    run.fold.gauge(0, waiting=4, running=0, free_pages=100, cached_pages=0)
    run.fold.gauge(250, waiting=0, running=4, free_pages=20, cached_pages=20)
    run.fold.gauge(1000, waiting=0, running=1, free_pages=90, cached_pages=10)
    run.finish(1200, 1)
    data = run.result()
    assert data.series.t_us.tolist() == list(range(0, 1200, 2))
    assert data.series.waiting[[0, 124, 125, 599]].tolist() == [4.0, 4.0, 0.0, 0.0]
    assert data.series.kv_used_pages[[0, 125, 499, 500]].tolist() == [0.0, 60.0, 60.0, 0.0]
    assert data.series.kv_cached_pages[[0, 125, 500]].tolist() == [0.0, 20.0, 10.0]
    assert data.summary["scheduler"]["waiting_mean"] == round(4 * 250 / 1200, 6)
    assert data.summary["scheduler"]["running_max"] == 4
    kv = data.summary["kv"]
    assert (kv["used_pages_max"], kv["used_share_max"], kv["used_pages_mean"]) == (60, 0.6, 37.5)


def test_without_gauges_levels_are_unknown() -> None:
    run = Run()
    run.answer(1, 0, [5, 9])
    data = run.result()
    assert np.isnan(data.series.waiting).all()
    assert data.summary["kv"]["used_pages_max"] is None
    assert data.summary["scheduler"]["running_mean"] is None


def test_amounts_fall_into_the_bin_in_which_they_end() -> None:
    run = Run()
    run.arrive(1000, 1)
    run.batch(1, 1000, 1001, [(0, 7)], mode="extend", extend_rows=1)
    run.batch(2, 1001, 1003)
    run.stream(1003, {1: (0, 2)})
    run.finish(1004, 1)
    series = run.result().series
    assert series.t_us.tolist() == [1000, 1001, 1002, 1003]
    assert series.prefill_tokens.tolist() == [0, 7, 0, 0]
    assert series.decode_tokens.tolist() == [0, 0, 0, 1]
    assert series.gpu_busy_fraction.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert series.output_tokens_per_s.tolist() == [0.0, 0.0, 0.0, 2e6]


@pytest.mark.parametrize("stop_us", [1, 599, 600, 601, 1_234_567])
def test_bins_cover_the_run_and_stay_few(stop_us: int) -> None:
    run = Run()
    run.answer(1, 0, [stop_us])
    series = run.result().series
    assert 0 < len(series.t_us) <= BINS_MAX
    assert series.t_us[-1] < stop_us
    widths_us = np.diff(np.append(series.t_us, stop_us))
    assert (series.output_tokens_per_s * widths_us / 1e6).sum() == pytest.approx(1)


def test_cpu_time_is_added_up_by_work() -> None:
    run = Run()
    run.fold.cpu_interval(0, 10, "plan")
    run.fold.cpu_interval(20, 25, "results")
    run.fold.cpu_interval(30, 37, "plan")
    data = run.result()
    assert data.summary["cpu"] == {"busy_us": 22, "busy_us_by_work": {"plan": 17, "results": 5}}
    assert data.cpu.stop_us.tolist() == [10, 25, 37]


# ------------------------------------------------------------------------------------------------------- the fold


def test_an_empty_run_has_nothing_to_measure() -> None:
    data = Run().result("ttft_p99=1s")
    text = json.dumps(data.summary, allow_nan=False)
    assert json.loads(text)["latency"]["ttft_us_p99"] is None
    assert data.summary["slos"][0]["met"] is None
    assert len(data.requests.request_id) == 0


def test_results_may_be_requested_along_the_way() -> None:
    run = Run()
    run.arrive(0, 1)
    run.stream(10, {1: (0, 1)})
    before = run.result()
    run.stream(30, {1: (1, 1)})
    run.finish(30, 1)
    assert before.requests.output_tokens.tolist() == [1]
    assert run.result().requests.output_tokens.tolist() == [2]
    assert run.result().summary == run.result().summary


@pytest.mark.parametrize("known", [False, True])
def test_requests_that_never_arrived_are_refused(known: bool) -> None:
    run = Run()
    if known:
        run.arrive(0, 3)
    with pytest.raises(ContractError, match="request 5 has an event but never arrived"):
        run.finish(1, 5)
    run.stream(1, {5: (0, 1)})
    with pytest.raises(ContractError, match="request 5 has an event but never arrived"):
        run.result()


# ----------------------------------------------------------------------------------- against a token-by-token reference


@dataclass
class Story:
    """One request of a random run. Messages are (time, offset, tokens) and may repeat what was sent."""

    arrival_us: int
    messages: list[tuple[int, int, int]] = field(default_factory=list)
    finish_us: int = 0
    reason: FinishReason | None = None


@st.composite
def stories(draw: st.DrawFn) -> list[Story]:
    out = []
    for _ in range(draw(st.integers(0, 6))):
        story = Story(draw(st.integers(0, 50)))
        now_us, sent = story.arrival_us, 0
        for _ in range(draw(st.integers(0, 6))):
            now_us += draw(st.integers(0, 30))
            repeated = draw(st.integers(0, sent)) if draw(st.integers(0, 4)) == 0 else 0
            tokens = draw(st.integers(1, 3))
            story.messages.append((now_us, sent - repeated, tokens))
            sent = max(sent, sent - repeated + tokens)
        story.finish_us = now_us
        story.reason = draw(st.sampled_from(["length", "stop", "cancelled", "error", None]))
        out.append(story)
    return out


def tell(told: list[Story], finish_order: Sequence[int]) -> RunData:
    """Fold the requests: arrivals in order, one StreamTokens per instant, finishes at the end in the order given."""
    fold = MetricsFold()
    order = sorted(range(len(told)), key=lambda i: told[i].arrival_us)
    for request_id in order:
        event = RequestArrived(
            time_us=told[request_id].arrival_us, request_id=request_id, prompt=TokenRuns((0, 10)), max_new_tokens=99
        )
        fold.observe(event, Step())
    by_time: dict[int, list[tuple[int, int, int, int]]] = {}
    for request_id, story in enumerate(told):
        for place, (time_us, offset, tokens) in enumerate(story.messages):
            by_time.setdefault(time_us, []).append((place, request_id, offset, tokens))
    for time_us in sorted(by_time):
        # Two messages of one request at one instant are two commands, in order.
        commands: list[Command] = [
            StreamTokens(np.array([request_id], np.int64), int32s([offset]), int32s([tokens]), int32s(range(tokens)))
            for _, request_id, offset, tokens in sorted(by_time[time_us])
        ]
        fold.observe(BatchFinished(time_us, 0), Step(commands=commands))
    for request_id in finish_order:
        if (reason := told[request_id].reason) is not None:
            finished = RequestFinished(told[request_id].finish_us, request_id, reason, 0, 0)
            fold.observe(LaneReady(1000), Step(decided=[finished]))
    return fold.result([Slo.parse("ttft_p90=40us"), Slo.parse("tpot=12us")])


@given(told=stories(), data=st.data())
def test_the_fold_equals_a_walk_over_every_token(told: list[Story], data: st.DataObject) -> None:
    run = tell(told, data.draw(st.permutations(range(len(told)))))
    ids = run.requests.request_id.tolist()
    assert sorted(ids) == list(range(len(told)))

    gaps: list[float] = []
    good = 0
    output_tokens = 0
    for row, request_id in enumerate(ids):
        story = told[request_id]
        seen_us: dict[int, int] = {}  # output number: when it first came
        for time_us, offset, tokens in story.messages:
            for number in range(offset, offset + tokens):
                seen_us.setdefault(number, time_us)
        times_us = [seen_us[number] for number in sorted(seen_us)]
        assert run.requests.output_tokens[row] == len(times_us)
        assert run.requests.ttft_us[row] == (times_us[0] - story.arrival_us if times_us else -1)
        tpot_us = (times_us[-1] - times_us[0]) / (len(times_us) - 1) if len(set(times_us)) > 1 else math.nan
        np.testing.assert_equal(run.requests.tpot_us[row], tpot_us)
        completed = story.reason in ("length", "stop")
        if not completed:
            continue
        output_tokens += len(times_us)
        ttft_us = times_us[0] - story.arrival_us if times_us else -1
        good += ttft_us <= 40 and not tpot_us > 12
        gaps += [gap for gap in message_gaps(story) if not math.isnan(gap)]
        assert run.requests.e2e_us[row] == story.finish_us - story.arrival_us

    assert sorted(run.itl_us.expand().tolist()) == pytest.approx(sorted(gaps))
    assert run.summary["throughput"]["good_requests"] == good
    assert run.summary["throughput"]["output_tokens"] == output_tokens
    if gaps:
        assert run.summary["latency"]["itl_us_p99"] == pytest.approx(np.percentile(gaps, 99), abs=1e-3)
    json.dumps(run.summary, allow_nan=False)


def message_gaps(story: Story) -> list[float]:
    """The gaps of a request, one per new token behind its first message, message by message."""
    arrivals: list[tuple[int, int]] = []  # (time, new tokens)
    sent = 0
    for time_us, offset, tokens in story.messages:
        if offset + tokens > sent:
            arrivals.append((time_us, offset + tokens - sent))
            sent = offset + tokens
    return [(later - before) / tokens for (before, _), (later, tokens) in pairwise(arrivals) for _ in range(tokens)]


@given(told=stories(), data=st.data())
def test_the_order_in_which_requests_finish_does_not_matter(told: list[Story], data: st.DataObject) -> None:
    one = tell(told, range(len(told)))
    other = tell(told, data.draw(st.permutations(range(len(told)))))
    assert one.summary == other.summary
    for name, column in one.requests.columns().items():
        np.testing.assert_array_equal(column, other.requests.columns()[name])


@given(told=stories())
def test_slos_agree_with_the_percentiles_of_the_summary(told: list[Story]) -> None:
    finished = [story for story in told if story.reason in ("length", "stop", "cancelled")]
    run = tell(finished, range(len(finished)))
    for percentile in (50, 90, 99):  # equal without failures
        for metric in ("ttft", "tpot", "itl", "e2e"):
            measured_us = run.measured_us(Slo(metric, float(percentile), 1))
            assert measured_us == pytest.approx(run.summary["latency"][f"{metric}_us_p{percentile}"], abs=1e-3)


# ----------------------------------------------------------------------------------------------------- early results

Told = tuple[str, tuple[Any, ...]]  # the name of a method of MetricsFold, and its arguments


class Historian:
    """Makes up a run with every kind of event: retractions, repeats after a restart, lost batches and late results."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.told: list[Told] = []
        self.time_us = 0
        self.sent: dict[int, int] = {}  # by open request: the end of the output that the client has received
        self.next_batch = 1
        self.in_flight: list[int] = []

    def tell(self, actions: int) -> list[Told]:
        for _ in range(actions):
            self.time_us += self.random.choice((0, 0, 1, 7, 40, 5_000_000_000))
            self.random.choice((self.arrive, self.stream, self.stream, self.decide, self.launch, self.report))()
        return self.told

    def observe(self, event: Any, decided: Sequence[Decided] = (), commands: Sequence[Command] = ()) -> None:
        self.told.append(("observe", (event, Step(decided=list(decided), commands=list(commands)))))

    def arrive(self) -> None:
        """A new request arrives, perhaps under the id of one that ended."""
        request_id = self.random.choice([i for i in range(len(self.sent) + 3) if i not in self.sent])
        self.sent[request_id] = 0
        arrival = RequestArrived(
            time_us=self.time_us,
            request_id=request_id,
            prompt=TokenRuns((0, self.random.randrange(1, 50))),
            max_new_tokens=9,
            label=f"r{request_id}" * self.random.choice((1, 9)),
            tenant=self.random.choice("ab"),
        )
        self.observe(arrival)

    def stream(self) -> None:
        random = self.random
        ids = [request_id for request_id in self.sent if random.randrange(3)]
        random.shuffle(ids)
        commands: list[Command] = []
        if ids:
            repeated = [random.randrange(self.sent[i] + 1) if random.randrange(8) == 0 else 0 for i in ids]
            counts = [random.choice((1, 1, 1, 2, 3)) for _ in ids]
            offsets = [self.sent[i] - again for i, again in zip(ids, repeated, strict=True)]
            for request_id, offset, count in zip(ids, offsets, counts, strict=True):
                self.sent[request_id] = max(self.sent[request_id], offset + count)
            commands.append(StreamTokens(np.array(ids, np.int64), int32s(offsets), int32s(counts), int32s([])))
        ending = [i for i in ids if random.randrange(4) == 0]
        for request_id in ending:
            del self.sent[request_id]
        reasons: tuple[FinishReason, ...] = ("length", "stop", "cancelled", "error")
        decided = [RequestFinished(self.time_us, i, random.choice(reasons), 0, 0) for i in ending]
        batch_id = self.in_flight.pop(random.randrange(len(self.in_flight))) if self.in_flight else 0
        started_us = max(0, self.time_us - random.randrange(50))
        times = (started_us, self.time_us) if random.randrange(5) else (0, 0)
        self.observe(BatchFinished(self.time_us, batch_id, b"", *times), decided, commands)

    def decide(self) -> None:
        if not self.sent:
            return
        request_id = self.random.choice(list(self.sent))
        decided: Decided = self.random.choice(
            (
                RequestAdmitted(self.time_us, request_id, 0, self.random.randrange(9), 1, 0),
                RequestRetracted(self.time_us, request_id, 1, 2, 3, "pages"),
                RequestRejected(self.time_us, request_id, "queue_full", "no"),
                PagesEvicted(self.time_us, 3, "decode"),
            )
        )
        if isinstance(decided, RequestRejected):
            del self.sent[request_id]
        self.observe(LaneReady(self.time_us), [decided])

    def launch(self) -> None:
        random = self.random
        starts = int32s(random.randrange(90) for _ in range(random.randrange(4)))
        stops = starts + int32s(random.randrange(1, 5) for _ in starts)
        rows, modes = int32s(range(len(starts))), ("decode", "decode", "extend", "mixed")
        plan = BatchPlan(
            batch_id=self.next_batch, mode=random.choice(modes), rows=rows, request_ids=rows.astype(np.int64),
            starts=starts, stops=stops, extend_rows=random.randrange(len(starts) + 1),
        )  # fmt: skip
        if random.randrange(6):  # otherwise it is lost
            self.in_flight.append(plan.batch_id)
        self.next_batch += 1
        self.observe(LaneReady(self.time_us), commands=[LaunchBatch(plan)])

    def report(self) -> None:
        random = self.random
        self.told.append(("gauge", (self.time_us, random.randrange(9), random.randrange(3), random.randrange(99), 1)))
        self.told.append(("cpu_interval", (self.time_us, self.time_us + 3, random.choice(("plan", "results")))))


def folded(told: Sequence[Told], disturb: Callable[[MetricsFold], object] = lambda fold: None) -> RunData:
    """The measured run; `disturb` is called before each event."""
    fold = MetricsFold(kv_pages=100)
    for name, arguments in told:
        disturb(fold)
        getattr(fold, name)(*arguments)
    return fold.result([Slo.parse("itl_p90=30us"), Slo.parse("ttft_p50=1s")])


def assert_equal_runs(one: RunData, other: RunData) -> None:
    assert one.summary == other.summary
    assert one.span_us == other.span_us
    np.testing.assert_array_equal(one.itl_us.values, other.itl_us.values)
    np.testing.assert_array_equal(one.itl_us.counts, other.itl_us.counts)
    for table in ("requests", "series", "batches", "cpu"):
        columns, others = getattr(one, table).columns(), getattr(other, table).columns()
        for name, column in columns.items():
            np.testing.assert_array_equal(column, others[name], err_msg=f"{table}.{name}")


@given(random=st.randoms(use_true_random=False), actions=st.integers(0, 40))
def test_settling_at_any_points_changes_no_answer(random: Random, actions: int) -> None:
    told = Historian(random).tell(actions)
    at_the_end = folded(told)
    often = random.randrange(1, 6)

    def compact(fold: MetricsFold) -> None:
        if random.randrange(often) == 0:
            fold.compact(part_rows=random.choice((1, 2, 4096)))

    def ask(fold: MetricsFold) -> None:
        if random.randrange(often) == 0:
            fold.result()

    assert_equal_runs(folded(told, compact), at_the_end)
    assert_equal_runs(folded(told, ask), at_the_end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold_module, "COMPACT_RESULTS_MIN", 1)  # it does so by itself
        patch.setattr(fold_module, "COMPACT_RESULTS_MAX", random.choice((1, 3)))  # and soon counts batches as lost
        assert_equal_runs(folded(told), at_the_end)
        assert_equal_runs(folded(told, compact), at_the_end)


def test_a_long_run_keeps_no_more_than_open_requests() -> None:
    run, ids = Run(), np.zeros(1, np.int64)
    for request_id in range(2_000):
        ids = np.array([request_id], np.int64)
        run.arrive(10 * request_id, request_id)
        for offset in range(3):
            message = StreamTokens(ids, int32s([offset]), int32s([1]), int32s([7]))
            finished = [RequestFinished(10 * request_id + offset, request_id, "length", 0, 0)] if offset == 2 else []
            event = BatchFinished(10 * request_id + offset, 3 * request_id + offset)
            run.fold.observe(event, Step(commands=[message], decided=finished))
    fold = run.fold
    assert len(fold._row_of) == 0
    assert len(fold._sent_messages) == len(fold._results) // 3 <= fold_module.COMPACT_RESULTS_MAX
    fold.compact(part_rows=1)
    assert (len(fold._ended), len(fold._sent_messages), len(fold._open_gaps[0])) == (0, 0, 0)
    data = run.result()
    assert (data.itl_us.values.tolist(), data.itl_us.counts.tolist()) == ([1.0], [4_000])
    assert data.requests.output_tokens.tolist() == [3] * 2_000


def test_an_ended_request_is_sent_nothing_more_and_may_not_arrive_twice() -> None:
    for settle in (False, True):
        run = Run()
        run.answer(1, 0, [10])
        if settle:
            run.fold.compact()
        run.stream(10, {1: (1, 1)})
        with pytest.raises(ContractError, match="request 1 has an event but never arrived, or has ended"):
            run.result()
    run = Run()
    run.arrive(0, 1)
    with pytest.raises(ContractError, match="request 1 arrived twice"):
        run.arrive(0, 1)
    run.finish(5, 1)
    run.answer(1, 10, [20])  # an id may be used again
    assert run.result().requests.request_id.tolist() == [1, 1]
    assert run.result().requests.ttft_us.tolist() == [-1, 10]
