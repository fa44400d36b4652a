"""A plan from its question to its answer: the search, and the same search at later loads."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.sim.plan.answer import Forecast, PlanAnswer
from lockstep.sim.plan.ledger import TrialStore
from lockstep.sim.plan.question import Question
from lockstep.sim.plan.search import Candidate, Progress, prepare, requests_if_short, run_plan, sample_line
from lockstep.sim.plan.workers import WorkerPool
from lockstep.sim.run.run_folder import workload_line
from lockstep.sim.workload.workload import Workload


def solve(
    question: Question,
    prepared: tuple[Sequence[Candidate], Workload],
    later: Sequence[tuple[float, Question]],
    workers: WorkerPool,
    ledger: TrialStore,
    progress: Progress,
) -> PlanAnswer:
    """Search, and return the answer with those at later loads. Raises KeyboardInterrupt after Ctrl-C.

    Args:
        prepared: what `prepare` returned for the question.
        later: factors on the load, with the question at each.
    """
    candidates, opened = prepared
    line = workload_line(opened, closed=question.load == "sessions")
    run_plan(question, candidates, workers, ledger, progress)
    forecast = []
    for factor, asked in later:
        more, _ = prepare(asked)
        run_plan(asked, more, workers, ledger, progress)
        forecast.append(Forecast.of(factor, PlanAnswer(question=asked, candidates=more, workload_line=line)))
    return PlanAnswer(
        question=question,
        candidates=candidates,
        workload_line=line,
        sample_line=sample_line(question, opened),
        requests_if_short=requests_if_short(question, opened),
        forecast=tuple(forecast),
    )
