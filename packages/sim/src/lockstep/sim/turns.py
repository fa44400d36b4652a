"""One request to come, and the error for a workload that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass

LENGTH_TOKENS_MAX = 2**24  # of one prompt or one output; beyond any context window, so more is a mistake
TIME_US_MAX = 2**53  # 285 years: room for times since 1970, and exact as a float


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to come: when, which tokens, how many it will produce. None of them: its prompt is all that is run.

    A turn with `after` is the next turn of a session (closed loop): its user reads the answer of turn `after`, thinks
    for `think_us`, and sends. Every other turn arrives by the clock, whatever the server does (open loop).
    """

    index: int  # position in the workload, 0..n-1
    arrival_us: int  # since the workload's start; 0 and ignored where `after` is set
    prompt: tuple[int, ...]  # runs of token ids, (first_token, count, ...); see token_runs.py
    prompt_tokens: int  # the sum of the counts
    output_tokens: int  # tokens the model will produce
    output_first_token: int  # produced token i is output_first_token + i
    label: str  # opaque name shown to people
    tenant: str = ""
    after: int | None = None  # index of the turn whose finish starts this one's think time
    think_us: int = 0
    grammar: str = ""  # name of the grammar its output must follow; none by default


class WorkloadError(ValueError):
    """A workload that cannot be used: where, what is wrong with it, and what to try."""

    def __init__(self, where: str, problem: str, hint: str) -> None:
        super().__init__(where, problem, hint)  # all three, so that it survives pickling between processes
        self.where = where
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}\nhint: {self.hint}"
