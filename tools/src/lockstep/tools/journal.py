"""Inspect, check and replay a journal.

    lockstep journal info RUN      its writer, the number of events of each type, its end
    lockstep journal dump RUN      one line per record, or one JSON object with --jsonl
    lockstep journal check RUN     framing, chain and snapshots; --repair cuts a torn tail off
    lockstep journal verify RUN    replay every event and compare every digest
    lockstep journal salvage RUN --out DIR   copy what is before a corrupt record
    lockstep journal forget RUN --tenant NAME --out DIR   copy everything but the content of one tenant's requests

RUN is a run folder or the `journal` folder in it. Results go to stdout and everything else to stderr. Steps are counted
from 0, and spans are half-open: `--from 5 --until 8` is steps 5, 6 and 7.

Exit status: 0 no problem; 1 a torn tail (check), or equal and not closed (verify); 2 corrupt, unreadable or no journal;
3 the replay diverged (verify).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import (
    EndRecord,
    EventRecord,
    HeaderRecord,
    JournalCorrupt,
    JournalError,
    JournalHeader,
    Record,
    Snapshot,
    SnapshotFault,
    SnapshotRecord,
    Tail,
    UnsealedRecord,
)
from lockstep.core.journal.replay import Divergence, event_line, replay
from lockstep.core.journal.salvage import salvaged
from lockstep.host.router_journal import RouterReader, is_router_folder
from lockstep.tools.runs import (
    EXIT_DIVERGED,
    EXIT_UNREADABLE,
    JSON,
    RUN,
    ToolError,
    engine_runs,
    json_line,
    print_json,
    refusals,
    router_runs,
)

EXIT_TORN = 1
EXIT_NOT_CLOSED = 1


@click.group(help=__doc__.replace("\n\n    ", "\n\n\b\n    ") if __doc__ else None)
def journal() -> None:
    """Inspect, check and replay a journal."""


# ---------------------------------------------------------------------------------------------------------------- info


@journal.command()
@RUN
@JSON
def info(run: Path, as_json: bool) -> None:
    """Show header, event counts, duration, bytes and tail."""
    try:
        opened = read_journal(run)
        counts: Counter[str] = Counter()
        others: Counter[str] = Counter()
        first_us: int | None = None
        last_us = 0
        end = ""
        for record in opened.records():
            if isinstance(record, EventRecord):
                counts[type(record.event).__name__] += 1
                last_us = record.event.time_us
                first_us = last_us if first_us is None else first_us
            else:
                others[type(record).__name__.removesuffix("Record").lower()] += 1
                end = record.reason if isinstance(record, EndRecord) else ""
        size_bytes = sum(path.stat().st_size for path in opened.segments)
        tail = opened.tail
    except JournalError as error:
        raise ToolError(error) from error

    duration_us = last_us - first_us if first_us is not None else 0
    if as_json:
        print_json(
            {
                "folder": str(opened.folder),
                "header": _header_json(opened.header),
                "segments": len(opened.segments),
                "bytes": size_bytes,
                "records": tail.records,
                "events": counts.total(),
                "events_by_type": dict(counts.most_common()),
                "other_records": dict(others),
                "duration_us": duration_us,
                "end_reason": end if tail.closed else None,
                "tail": _tail_json(tail),
            }
        )
        return
    header = opened.header
    rows = [
        ("journal", f"{opened.folder}: {_count(len(opened.segments), 'segment')}, {size_bytes:,} bytes"),
        ("written by", f"core {header.core_version}, format {header.format_version}"),
        ("flags", ", ".join(header.behaviour_flags) or "none"),
        ("seed", str(header.seed)),
        ("model", header.model_digest or "not recorded"),
        ("tokenizer", header.tokenizer_digest or "not recorded"),
        *((f"host {name}" if not i else f"     {name}", str(v)) for i, (name, v) in enumerate(header.host.items())),
        ("config", _config_text(header.config)),
        ("duration", f"{duration_us / 1e6:.6f} s from first to last event"),
        ("events", f"{counts.total():,} in {tail.records:,} records"),
        *((f"  {name}", f"{count:,}") for name, count in counts.most_common()),
        *((f"  ({name})", f"{count:,}") for name, count in others.items() if name in ("unsealed", "snapshot")),
        ("tail", _tail_text(tail, end)),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"{name:{width}}  {text}")


def _config_text(config: SchedConfig) -> str:
    """Return the settings that differ from their defaults, as text; --json has all settings."""
    changed = [
        f"{field.name}={getattr(config, field.name)}"
        for field in msgspec.structs.fields(config)
        if getattr(config, field.name) != field.default
    ]
    return ", ".join(changed) or "all defaults"


def _tail_text(tail: Tail, end: str = "") -> str:
    if tail.verdict == "torn":
        return f"torn: {tail.segment} is whole up to offset {tail.offset}, then {tail.torn_bytes} bytes ({tail.reason})"
    if tail.closed:
        return f"clean, ended: {end}" if end else "clean, closed"
    return "clean, not closed: the writer was killed or is still writing, or the end is missing"


def _tail_json(tail: Tail) -> dict[str, object]:
    return {**msgspec.structs.asdict(tail), "chain": tail.chain.hex()}


# ---------------------------------------------------------------------------------------------------------------- dump


@journal.command()
@RUN
@click.option("--from", "start", type=click.IntRange(0), default=0, help="First step to show, counted from 0.")
@click.option("--until", "stop", type=click.IntRange(0), help="Step to stop before.")
@click.option("--jsonl", is_flag=True, help="One JSON object per record, content in full; bytes are base64.")
def dump(run: Path, start: int, stop: int | None, jsonl: bool) -> None:
    """Print one line per record.

    A line has sequence, step, time in ms, event, and the first bytes of the Step's digest. It counts prompts and
    outputs instead of showing them; --jsonl shows them. RUN/router is the journal of a cluster's router: JSON only.
    """
    try:
        if is_router_folder(run):
            for entry in RouterReader(run.parent).entries():
                click.echo(json_line(msgspec.to_builtins(entry.content)))
            return
        opened = read_journal(run)
        if not jsonl:
            click.echo(f"{'record':>8} {'step':>8} {'t_ms':>12}  event")
        steps = 0  # events before this record
        for record in opened.records():
            if stop is not None and steps >= stop:
                break
            if start <= steps:
                click.echo(_json_line(record) if jsonl else _text_line(record))
            steps += isinstance(record, EventRecord)
        else:
            tail = opened.tail
            if tail.verdict == "torn":
                click.echo(f"tail {_tail_text(tail)}", err=True)
    except JournalError as error:
        raise ToolError(error) from error


def _text_line(record: Record) -> str:
    place = f"{record.sequence:>8}"
    match record:
        case EventRecord(step=step, event=event, digest=digest):
            time_ms = f"{event.time_us / 1e3:.3f}"
            return f"{place} {step:>8} {time_ms:>12}  {event_line(event)}  -> {digest[:4].hex()}"
        case UnsealedRecord(event=event):
            time_ms = f"{event.time_us / 1e3:.3f}"
            return f"{place} {'-':>8} {time_ms:>12}  {event_line(event)}  -> its step raised"
        case HeaderRecord(header=header):
            text = f"segment {header.segment} of core {header.core_version}, format {header.format_version}"
        case SnapshotRecord(snapshot=snapshot):
            text = f"snapshot after {snapshot.steps} steps in {snapshot.file}"
        case EndRecord(reason=reason):
            text = f"end: {reason}"
        case _:
            raise AssertionError(record)
    return f"{place} {'-':>8} {'-':>12}  {text}"


def _json_line(record: Record) -> str:
    content: dict[str, object] = {"sequence": record.sequence, "segment": record.segment, "offset": record.offset}
    match record:
        case EventRecord(step=step, event=event, digest=digest):
            content |= {"kind": "event", "step": step, **_event_json(event), "digest": digest.hex()}
        case UnsealedRecord(event=event):
            content |= {"kind": "unsealed", **_event_json(event)}
        case HeaderRecord(header=header):
            content |= {"kind": "header", "header": _header_json(header)}
        case SnapshotRecord(snapshot=snapshot):
            content |= {"kind": "snapshot", "snapshot": _snapshot_json(snapshot)}
        case EndRecord(reason=reason):
            content |= {"kind": "end", "reason": reason}
        case _:
            raise AssertionError(record)
    return json_line(content)


def _event_json(event: msgspec.Struct) -> dict[str, object]:
    return {"type": type(event).__name__, "fields": _named(event)}


def _named(value: object) -> object:
    """Return a struct as a dict of its fields: on the wire it is an array, without the names of the fields."""
    if isinstance(value, msgspec.Struct):
        fields = {field.name: _named(getattr(value, field.name)) for field in msgspec.structs.fields(value)}
        tag = value.__struct_config__.tag
        return {"type": tag, **fields} if tag is not None and "type" not in fields else fields
    if isinstance(value, tuple):
        return [_named(item) for item in value]
    return value


def _header_json(header: JournalHeader) -> dict[str, object]:
    return {**msgspec.structs.asdict(header), "previous_chain": header.previous_chain.hex()}


def _snapshot_json(snapshot: Snapshot) -> dict[str, object]:
    return {
        **msgspec.structs.asdict(snapshot),
        "bytes_digest": snapshot.bytes_digest.hex(),
        "state_digest": snapshot.state_digest.hex(),
    }


# --------------------------------------------------------------------------------------------------------------- check


@journal.command()
@RUN
@click.option("--repair", is_flag=True, help="Cut a torn tail off. Corruption is never touched.")
@JSON
def check(run: Path, repair: bool, as_json: bool) -> None:
    """Check framing and chain of every record, and the files of snapshots.

    For a cluster's run, the journals of all engines and of the router are checked. Exit status: 0 clean; 1 torn tail,
    not repaired; 2 corrupt, with the offset, or a snapshot is missing or altered.
    """
    engines = engine_runs(run)
    statuses = [_check_run(engine, repair, as_json, f"engine {engine.name}: ") for engine in engines]
    statuses += [_check_router(part, repair, as_json) for part in router_runs(run)]
    if status := max(statuses) if engines else _check_run(run, repair, as_json):
        sys.exit(status)


def _check_run(run: Path, repair: bool, as_json: bool, of: str = "") -> int:
    """Check one journal and print the result; return the exit status."""
    try:
        opened = read_journal(run)
        tail = opened.tail
        repaired = repair and tail.verdict == "torn"
        if repaired:
            opened = read_journal(run, repair=True)
        faults = opened.snapshot_faults()
    except JournalCorrupt as error:
        if as_json:
            print_json({"verdict": "corrupt", "segment": error.segment, "offset": error.offset, "reason": error.reason})
        raise ToolError(error) from error
    except JournalError as error:
        raise ToolError(error) from error

    if as_json:
        print_json({**_tail_json(tail), "repaired": repaired, "snapshot_faults": _faults_json(faults)})
    else:
        click.echo(f"{of}{_tail_text(tail)}; {_count(tail.records, 'record')}, {_count(tail.steps, 'event')}")
        if repaired:
            click.echo(f"repaired: cut {tail.torn_bytes} bytes off {tail.segment}")
    if faults:
        _print_faults(opened.folder, faults)
        return EXIT_UNREADABLE
    if tail.verdict == "torn" and not repaired:
        click.echo(f"hint: lockstep journal check {run} --repair cuts it off; no whole record is lost", err=True)
        return EXIT_TORN
    return 0


def _check_router(part: Path, repair: bool, as_json: bool) -> int:
    """Check the journal of a router and print the result; return the exit status."""
    try:
        reader = RouterReader(part)
        entries = sum(1 for _ in reader.entries())
        tail = reader.tail
        repaired = repair and tail is not None and tail.verdict == "torn"
        if repaired:
            reader.repair()
    except JournalCorrupt as error:
        if as_json:
            print_json({"verdict": "corrupt", "segment": error.segment, "offset": error.offset, "reason": error.reason})
        raise ToolError(error) from error
    except JournalError as error:
        raise ToolError(error) from error
    old = [str(path) for path in reader.old_files]
    if as_json:
        ends = {} if tail is None else _tail_json(tail)
        print_json({"router": str(part), **ends, "repaired": repaired, "without_integrity": old})
    else:
        ends_text = "no end" if tail is None else _tail_text(tail)
        click.echo(f"router: {ends_text}; {_count(entries, 'record')}")
        for path in old:
            click.echo(_without_integrity(path))
        if repaired and tail is not None:
            click.echo(f"repaired: cut {tail.torn_bytes} bytes off {tail.segment}")
    return EXIT_TORN if tail is not None and tail.verdict == "torn" and not repaired else 0


def _without_integrity(path: Path | str) -> str:
    return f"{path} is of an earlier version, without checksums: lost or altered lines may go unnoticed"


def _print_faults(folder: Path, faults: Sequence[SnapshotFault]) -> None:
    for fault in faults:
        click.echo(f"JournalCorrupt: {folder}: snapshot {fault}", err=True)


def _faults_json(faults: Sequence[SnapshotFault]) -> list[dict[str, object]]:
    return [msgspec.structs.asdict(fault) for fault in faults]


# -------------------------------------------------------------------------------------------------------------- verify


@journal.command()
@RUN
@click.option("--until", type=click.IntRange(0), help="Step to stop before; all by default.")
@JSON
def verify(run: Path, until: int | None, as_json: bool) -> None:
    """Replay every event, compare every digest.

    A journal without an end record, or with a torn tail, is verified up to its last complete record. Files of snapshots
    are compared with their records. For a cluster's run every engine is verified, then the decisions of the router, and
    then the router's requests are compared with those of the engines. Exit status: 0 equal; 1 equal, but not closed;
    2 corrupt; 3 diverged.
    """
    if status := verify_all(run, until, as_json):
        sys.exit(status)


def verify_all(run: Path, until: int | None, as_json: bool) -> int:
    """Verify the run of one engine, or of a cluster with its router, and print the result; return the exit status."""
    engines = engine_runs(run)
    if not engines:
        return verify_run(run, until, as_json)
    statuses = [verify_run(engine, until, as_json, f"engine {engine.name}: ") for engine in engines]
    routers = router_runs(run) if until is None else []
    if routers:
        statuses.append(_verify_routers(run, routers, as_json))
    return max(statuses)


def _verify_routers(run: Path, routers: Sequence[Path], as_json: bool) -> int:
    """Verify the routers of a cluster's run, and compare them with its engines; return the exit status."""
    from lockstep.host.router_check import RouterDivergence, compare_with_engines, verify_router

    status = 0
    try:
        for part in routers:
            done = verify_router(part)
            is_open = done.tail is not None and not done.tail.closed
            status = max(status, EXIT_NOT_CLOSED if is_open else 0)
            if as_json:
                print_json(
                    {
                        "verdict": "not closed" if is_open else "equal",
                        "facts": done.facts,
                        "decisions": done.decisions,
                        "closed": done.tail.closed if done.tail is not None else None,
                        "torn_tail": done.tail is not None and done.tail.verdict == "torn",
                        "without_integrity": [str(path) for path in done.old_files],
                    }
                )
                continue
            click.echo(
                f"router: {'equal so far' if is_open else 'equal'}: {_count(done.facts, 'fact')}, "
                f"{_count(done.decisions, 'decision')}"
            )
            if is_open and done.tail is not None:
                click.echo(f"tail {_tail_text(done.tail)}; verified up to the last whole record")
            for path in done.old_files:
                click.echo(_without_integrity(path))
        differences = compare_with_engines(run)
    except RouterDivergence as error:
        if as_json:
            print_json({"verdict": "diverged", "router": str(error)})
        click.echo(f"Divergence: {error}", err=True)
        sys.exit(EXIT_DIVERGED)
    except JournalError as error:
        raise ToolError(error) from error
    if as_json:
        print_json({"router_and_engines": differences})
    for difference in differences:
        click.echo(f"JournalError: {run}: {difference}", err=True)
    return max(status, EXIT_UNREADABLE if differences and not status else 0)


def verify_run(run: Path, until: int | None, as_json: bool, of: str = "") -> int:
    """Verify one journal and print the result, with `of` in front; return the exit status.

    Raises: SystemExit for a divergence; ToolError for a journal that cannot be read.
    """
    try:
        done = replay(run, until=until)
    except Divergence as error:
        if as_json:
            print_json(
                {
                    "verdict": "diverged",
                    "step": error.step,
                    "sequence": error.sequence,
                    "expected_digest": error.expected_digest.hex(),
                    "got_digest": error.got_digest.hex() if error.got_digest is not None else None,
                    "flags": error.flags,
                }
            )
        print_divergence(run, error)
        sys.exit(EXIT_DIVERGED)
    except JournalError as error:
        raise ToolError(error) from error

    is_open = done.tail is not None and not done.tail.closed
    if as_json:
        print_json(
            {
                "verdict": "not closed" if is_open else "equal",
                "events": done.events,
                "steps": done.steps,
                "batches": done.batches,
                "unsealed": done.unsealed,
                "digest": done.digest.hex(),
                "closed": done.tail.closed if done.tail is not None else None,
                "torn_tail": done.tail is not None and done.tail.verdict == "torn",
                "snapshot_faults": _faults_json(done.snapshot_faults),
            }
        )
    else:
        click.echo(
            f"{of}{'equal so far' if is_open else 'equal'}: {_count(done.events, 'event')}, "
            f"{_count(done.steps, 'step')}, {_count(done.batches, 'batch', 'es')}, "
            f"final digest {done.digest.hex() or 'none'}"
        )
        if done.unsealed:
            click.echo(f"not replayed: {_count(done.unsealed, 'event')} whose step had raised")
        if is_open and done.tail is not None:
            click.echo(f"tail {_tail_text(done.tail)}; verified up to the last whole record")
    if done.snapshot_faults:
        _print_faults(run, done.snapshot_faults)
        return EXIT_UNREADABLE
    return EXIT_NOT_CLOSED if is_open else 0


def print_divergence(run: Path, divergence: Divergence, decisions: Path | None = None) -> None:
    """Print the first differing decision of a replay on stderr, with the text of both decisions as far as available."""
    from lockstep.tools.strict import diverged_step

    click.echo(f"Divergence: {divergence}", err=True)
    found = diverged_step(run, divergence, decisions)
    for line in found.lines() if found is not None else ():
        click.echo(line, err=True)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


# ------------------------------------------------------------------------------------------------------------- convert


@journal.command()
@RUN
@click.option("--out", type=click.Path(path_type=Path), help="Where to write; a recording's files are written to RUN.")
@click.option("--model", help="Catalogue name or path of the model, for batches.jsonl.")
@click.option("--gpu", help="Catalogue name of the GPU, for batches.jsonl.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="GPUs of the engine.")
def convert(run: Path, out: Path | None, model: str | None, gpu: str | None, tp: int) -> None:
    """Write what a run measured as files that other commands read.

    Of a journal: a run folder with the latencies as the engine measured them, in --out. Of a recording of another
    engine's scheduler: the same in RUN, and its requests as a trace; with --model and --gpu its batches.

    \b
    lockstep journal convert runs/vllm --out runs/measured
    lockstep compare runs/measured runs/simulated
    lockstep journal convert runs/own --model qwen3-8b --gpu h100
    """
    from lockstep.host.recording import has_recording
    from lockstep.sim.run.run_folder import prepare_folder
    from lockstep.tools import recording

    with refusals():
        if has_recording(run):
            if out is not None:
                raise ConfigError(f"`--out` {out}: the files of a recording are written to {run}\nhint: leave it out")
            if (model is None) != (gpu is None):
                raise ConfigError("batches.jsonl needs both `--model` and `--gpu`\nhint: give both, or neither")
            summary = recording.convert(run, model=model, gpu=gpu, tp=tp)
            batches = "batches.jsonl, " if model is not None else ""
            written = f"{run}: metrics.json, requests.parquet, requests.csv, {batches}requests.jsonl"
        else:
            if out is None:
                raise ConfigError("a journal needs `--out`: its own folder stays as it is\nhint: --out runs/measured")
            if model is not None or gpu is not None:
                raise ConfigError(
                    "`--model` and `--gpu` are for batches.jsonl of a recording\n"
                    "hint: lockstep calibrate --from reads the journal itself"
                )
            prepare_folder(out, overwrite=False)
            summary = recording.convert_journal(run, out)
            written = f"{out}: metrics.json, requests.parquet, requests.csv"
    requests = summary["requests"]
    click.echo(f"{written}; {requests['arrived']:,} requests arrived, {requests['completed']:,} completed")


# ------------------------------------------------------------------------------------------------------------- salvage


@journal.command()
@RUN
@click.option(
    "--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="A new run folder for the copy."
)
@JSON
def salvage(run: Path, out: Path, as_json: bool) -> None:
    """Copy the records of a corrupt journal that are before the first corrupt one into a new run folder.

    Stored answers, conversations and files beside the journal are copied, too. The run itself is not changed. A server
    continues the copy with `--journal DIR`.
    """
    from lockstep.host.answer_folders import ANSWERS
    from lockstep.tools.forget import forget_answers

    with refusals():
        kept = salvaged(run, out)
        answers = (run.parent if run.name == "journal" else run) / ANSWERS
        if answers.is_dir():
            forget_answers(answers, None, out / ANSWERS)
    tail = read_journal(out).tail
    if as_json:
        print_json({**_tail_json(tail), "dropped_bytes": kept.dropped_bytes, "corrupt": kept.why})
    else:
        click.echo(f"{out}: {_count(tail.records, 'record')}, {_count(tail.steps, 'event')}")
        click.echo(f"{kept.dropped_bytes} bytes are left out: {kept.why}")


# -------------------------------------------------------------------------------------------------------------- forget


@journal.command(name="forget")
@RUN
@click.option("--tenant", required=True, help="The tenant whose prompts and answers are left out.")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="A new run folder for the copy."
)
def forget_tenant(run: Path, tenant: str, out: Path) -> None:
    """Copy a journal without prompts, answers and texts of one tenant's requests.

    Every decision of the copy equals the journal's. Answers that a server stored beside the journal are copied without
    those of the tenant. The journal itself is not changed; delete it when the copy is there.
    """
    from lockstep.tools.forget import forget

    with refusals():
        requests = forget(run, tenant, out)
    click.echo(f"{out}: without the content of {_count(requests, 'request')} of tenant {tenant!r}")


if __name__ == "__main__":
    journal()
