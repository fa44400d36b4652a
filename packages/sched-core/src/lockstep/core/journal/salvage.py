"""A copy of a corrupt journal up to its first corrupt record.

segment 6 | segment 7 ..... X ....... | segment 8          X: a record that was altered
segment 6 | segment 7 .....                                the copy
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import JournalCorrupt, JournalError, SnapshotRecord
from lockstep.core.journal.segments import SNAPSHOT_NAME, find_journal, snapshot_name


@dataclass(frozen=True, slots=True)
class Salvage:
    """What a copy leaves out.

    Args:
        dropped_bytes: bytes of segments that are not in the copy.
        why: the corruption.
    """

    dropped_bytes: int
    why: str


def salvaged(run: Path, out: Path) -> Salvage:
    """Copy the intact beginning of a corrupt journal.

    Args:
        run: a run folder, or the `journal` folder in it.
        out: a run folder that does not exist yet, or is empty.
    Raises: JournalError if the journal is not corrupt, has no intact beginning, or `out` is in use.
    """
    folder = find_journal(run)
    if out.exists() and any(out.iterdir()):
        raise JournalError(f"{out} is not empty\nhint: give a new folder")
    try:
        tail = read_journal(folder).tail
    except JournalCorrupt as error:
        corrupt = error
    else:
        raise JournalError(
            f"{folder} is not corrupt; its end is {tail.verdict}\n"
            "hint: `lockstep journal check RUN --repair` cuts a torn tail off"
        )
    damaged, offset = Path(corrupt.segment), corrupt.offset
    segments = sorted(folder.glob("*.log"))
    whole = [path for path in segments if path.name < damaged.name]
    if not whole and not offset:
        raise JournalError(f"{damaged} is corrupt from its beginning, and no segment is before it: nothing is left")
    made = out / "journal"
    made.mkdir(mode=0o700, parents=True)
    for path in whole:
        shutil.copyfile(path, made / path.name)
    kept_bytes = sum(path.stat().st_size for path in whole) + offset
    if offset:
        (made / damaged.name).write_bytes(damaged.read_bytes()[:offset])
    for path in folder.iterdir():
        if SNAPSHOT_NAME.fullmatch(path.name):
            shutil.copyfile(path, made / path.name)
    found = [one for one in read_journal(made).records() if isinstance(one, SnapshotRecord)]
    named = {snapshot_name(one.sequence) for one in found}
    for path in made.glob("snapshot-*"):
        if path.name not in named:
            path.unlink()
    for path in made.iterdir():
        path.chmod(0o600)
    return Salvage(sum(path.stat().st_size for path in segments) - kept_bytes, str(corrupt))
