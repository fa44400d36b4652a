"""A worker's text processes: a job may take so much processor time, and the import of libraries is no part of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")

from lockstep.api.processes import children
from lockstep.api.processes.text_jobs import JobError, ParseBody
from lockstep.api.processes.text_processes import TextProcesses
from lockstep.api.settings import ServeSettings

KNOWN = frozenset(("a", "b", "prompt"))
COSTLY = b'{"prompt": [' + b'{"a": [1]},' * 300_000 + b"1]}"  # 0.1 s on a fast processor, of which 0.02 s are given


def parsed(folder: Path, *bodies: bytes, job_s: float) -> list[str]:
    """What each body gives in turn, by one process at a time: its first key, or the error."""

    async def run() -> list[str]:
        processes, found = TextProcesses(folder, 1, job_s), []
        try:
            for body in bodies:
                job = ParseBody(
                    frozenset(("a", "b", "prompt")), frozenset(), len(body), fields_max=9, ids_max=9, values_max=10**6
                )
                try:
                    found.append(next(iter(await processes.parse(job, [body]))))
                except JobError as error:
                    found.append(error.message)
        finally:
            await processes.close()
        return found

    return asyncio.run(run())


def test_a_job_of_much_processor_time_ends_alone(tmp_path: Path) -> None:
    children.write_settings(tmp_path, ServeSettings(emulate="qwen3-0.6b@h200"))
    assert parsed(tmp_path, b'{"a": 1}', COSTLY, b'{"b": 2}', job_s=0.02) == [
        "a",  # though the start of the process took longer
        "the request takes longer than 0.02 s of processor time to read",
        "b",
    ]
    assert parsed(tmp_path, COSTLY, job_s=60) == ["prompt"]
