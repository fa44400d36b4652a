"""The requests of a recording of another engine's scheduler (`lockstep.host.recording`) as turns.

Hashes of blocks show which whole pages of prompts are equal. Tokens behind the last whole page are equal to no others.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.host.recording import Arrived, PassFinished, read_recording
from lockstep.sim.workload.journal_turns import label_parts
from lockstep.sim.workload.token_runs import append_run
from lockstep.sim.workload.turns import TurnLabel, Turns, TurnsBuilder, TurnStart, WorkloadError


def turns_of_recording(run: Path) -> tuple[Turns, list[str]]:
    """Return the answered requests of a recording as turns, and a sentence if some have no answer.

    Raises: WorkloadError if none has an answer; RecordingError.
    """
    header, records = read_recording(run)
    arrived: list[Arrived] = []
    outputs: list[int] = []
    for record in records:
        if isinstance(record, Arrived):
            arrived.append(record)
            outputs.append(0)
        elif isinstance(record, PassFinished):
            for number, tokens in record.tokens:
                outputs[number] += tokens
    if not any(outputs):
        raise WorkloadError(str(run), "no request of this recording has an answer", "record a run that serves requests")
    builder, first_of, fresh, page = TurnsBuilder(), dict[int, int](), 0, max(header.page_size, 1)
    for number, (one, output) in enumerate(zip(arrived, outputs, strict=True)):
        if not output:
            continue
        prompt: list[int] = []
        tokens = max(one.prompt_tokens, 1)
        for block in one.blocks[: tokens // page]:
            first = first_of.setdefault(block, fresh)
            fresh += page if first == fresh else 0
            append_run(prompt, first, page)
        if left := tokens - sum(prompt[1::2]):
            append_run(prompt, fresh, left)
            fresh += left
        builder.append(
            TurnStart(one.time_us - arrived[0].time_us),
            TurnLabel(*label_parts(one.name or f"r{number}")),
            prompt=prompt,
            prompt_tokens=tokens,
            output_tokens=output,
            output_first_token=fresh,
        )
        fresh += output
    unanswered = sum(not output for output in outputs)
    return builder.build(), [f"{unanswered:,} requests without an answer are left out"] if unanswered else []
