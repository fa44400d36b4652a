"""Sessions with tokens and KV that the server keeps (`/open_session`): a turn sends only its new tokens.

    turns = with_server_sessions(turns)      # turns with a session, and how much of each the server has
    Conversations()                          # opens and closes sessions beside the requests of one engine

A session is opened when its first turn arrives, and closed when its last turn has ended, or when it breaks off. Each
turn names the session, states how many of the kept tokens stay, and sends the tokens after them. All kept tokens stay
unless a trace edits its history; then the turn begins where the two differ. A request without later turns has no
session.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lockstep.sim.workload.token_runs import append_run, common_tokens
from lockstep.sim.workload.turns import Turns


def with_server_sessions(turns: Turns) -> Turns:
    """Return the same turns, each with its session and the tokens that the server keeps of it.

    If several turns follow one answer, the session would be ambiguous, so these turns have none.
    """
    root = turns.root()
    after = turns.after.astype(np.int64)
    behind = np.bincount(after[after >= 0], minlength=len(turns))
    sizes, forks = np.bincount(root, minlength=len(turns)), np.zeros(len(turns), np.bool_)
    forks[root[behind > 1]] = True
    session = np.where((sizes[root] > 1) & ~forks[root], root, -1)
    kept = np.zeros(len(turns), np.int32)
    rows = np.flatnonzero((session >= 0) & (after >= 0))
    for row, before in zip(rows.tolist(), after[rows].tolist(), strict=True):
        history, own = (list(runs) for runs in turns.prompts(np.array([before, row])))
        append_run(history, int(turns.output_first_token[before]), int(turns.output_tokens[before]))
        kept[row] = min(common_tokens(history, own), int(turns.prompt_tokens[row]) - 1)
    return replace(turns, session=session.astype(np.int32), session_kept=kept, session_last=behind == 0)


def describe_server_sessions(turns: Turns) -> str:
    """Return a sentence for the notes of a workload."""
    assert turns.session is not None
    assert turns.session_kept is not None
    of_one = turns.session >= 0
    kept, whole = int(turns.session_kept[of_one].sum()), int(turns.prompt_tokens[of_one].sum())
    return (
        f"{int(of_one.sum()):,} of {len(turns):,} requests are turns of {len(np.unique(turns.session[of_one])):,} "
        f"sessions of the server, which keep {kept:,} of their {whole:,} prompt tokens"
    )
