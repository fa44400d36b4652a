"""The findings as one page of Markdown: targets first, then tables, then what failed and what was skipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Found = Mapping[str, Any]


def markdown(report: Found) -> str:
    """The page, from whatever there is so far."""
    return "\n".join(_page(report)).rstrip() + "\n"


def _page(report: Found) -> Iterator[str]:
    sections: Found = report["sections"]
    figures = {name: found.get("figures", {}) for name, found in sections.items()}
    yield "# GPU check"
    yield ""
    yield from _machine(report, figures.get("machine", {}))
    yield from _targets(figures, sections)
    yield from _sections(sections)
    yield from _steps(figures.get("decode", {}))
    yield from _breakdown(figures.get("decode", {}))
    yield from _attention(figures.get("decode", {}))
    yield from _bubbles(figures.get("bubbles", {}))
    yield from _pieces(figures.get("pieces", {}))
    yield from _quantized(figures.get("quantized", {}))
    yield from _start(figures.get("start", {}))
    yield from _peer(figures.get("peer", {}))
    yield from _kernels(figures.get("kernels", {}))
    yield from _tuning(figures.get("tuning", {}))
    yield from _calibration(figures.get("tables", {}))
    yield from _troubles(sections)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(_cell(value) for value in row) + " |"
    yield ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).replace("|", "/")


def _machine(report: Found, machine: Found) -> Iterator[str]:
    gpu, versions = machine.get("gpu", {}), machine.get("versions", {})
    if report["small"] or report["device"] == "cpu":
        yield "**A try at small sizes: no figure here means anything.**"
        yield ""
    rows = [
        (
            "GPU",
            f"{gpu['name']}, {gpu['memory_gib']} GiB, {gpu['sms']} SMs, capability {gpu['capability']}"
            if gpu
            else "none",
        ),
        ("CPU", f"{machine['cpu']['model']}, {machine['cpu']['cores']} cores" if "cpu" in machine else None),
        ("versions", ", ".join(f"{name} {value}" for name, value in versions.items())),
        ("commit", f"{report['commit'] or 'unknown'}; runtime sources {machine.get('sources', 'unknown')}"),
        ("copy, read and written", f"{machine['copy_gbs']:,} GB/s" if "copy_gbs" in machine else None),
        ("bf16 product of 8192", f"{machine['matmul_tflops']} TFLOP/s" if "matmul_tflops" in machine else None),
        *((f"launch, {name}", f"{us} us") for name, us in machine.get("launch_us", {}).items()),
        ("took", f"{report.get('seconds', 0)} of {report['budget_s']} s"),
    ]
    yield from _table(("machine", ""), rows)


def _targets(figures: Mapping[str, Found], sections: Found) -> Iterator[str]:
    rows: list[tuple[Any, ...]] = []
    for batch, one in figures.get("decode", {}).get("targets", {}).items():
        said = f"{one['ratio']} by {one['by']}"
        rows.append((f"decode step at {batch} rows, times the floor", f"<= {one['target']}", said, _met(one["met"])))
    for count, one in figures.get("bubbles", {}).get("targets", {}).items():
        shares = ", ".join(f"{name} {value:.2%}" for name, value in one.items() if name.startswith("overlap"))
        shares += f", {one['how']}"
        rows.append((f"GPU idle between decodes, {count} requests", f"< {one['target']:.0%}", shares, _met(one["met"])))
    checks = [check for found in sections.values() for check in found.get("checks", [])]
    failed = sum(not check["ok"] for check in checks)
    rows.append(("checks", "all", f"{len(checks) - failed} of {len(checks)} hold", _met(not failed)))
    yield "## Targets"
    yield ""
    yield from _table(("what", "target", "measured", ""), rows)


def _met(met: bool) -> str:
    return "met" if met else "**MISSED**"


def _sections(sections: Found) -> Iterator[str]:
    yield "## Sections"
    yield ""
    rows = []
    for name, found in sections.items():
        checks = found.get("checks", [])
        passed = sum(check["ok"] for check in checks)
        ended = found.get("ended", "").partition("\n")[0]
        troubles = len(found.get("failures", {})), len(found.get("skipped", {}))
        rows.append((name, found.get("seconds"), f"{passed} of {len(checks)}", *troubles, ended))
    yield from _table(("section", "s", "checks hold", "failures", "skipped", ""), rows)


def _steps(decode: Found) -> Iterator[str]:
    if "steps" not in decode:
        return
    yield f"## Decode steps, {decode['model']['shape']} with random weights, context {decode['context']}"
    yield ""
    yield (
        "From the end of a step to the end of the next, sampling included. The floor is the time in which weights and "
        "KV are read at the bandwidth of a copy."
    )
    yield ""
    rows = [
        (
            label,
            int(batch),
            one["step_us"],
            one["step_us_p90"],
            one["batch_us"],
            one["floor_us"],
            one["ratio"],
            one["tokens_per_s"],
        )
        for label, by_batch in decode["steps"].items()
        for batch, one in by_batch.items()
    ]
    head = ("by", "rows", "step us", "p90", "batch us", "floor us", "times the floor", "tokens/s")
    yield from _table(head, sorted(rows, key=lambda row: (row[1], row[2])))


def _breakdown(decode: Found) -> Iterator[str]:
    for label, by_batch in decode.get("breakdown", {}).items():
        for batch, one in by_batch.items():
            yield f"{label}, {batch} rows, by the profiler: {one['us']:,} us and {one['launches']} launches a step,"
            yield f"{one['idle_share']:.2%} of it between kernels."
            yield ""
            rows = [(kind, found["us"], found["launches"]) for kind, found in one["kinds"].items()]
            rows += [(f"`{name}`", found["us"], found["launches"]) for name, found in one["dearest"].items()]
            yield from _table(("kernels", "us a step", "launches"), rows)


def _attention(decode: Found) -> Iterator[str]:
    kinds = decode.get("attention", {})
    if not kinds:
        return
    yield "## Attention, one layer"
    yield ""
    names = sorted({name for shapes in kinds.values() for one in shapes.values() for name in one})
    rows = []
    for kind, shapes in kinds.items():
        for shape, one in shapes.items():
            row: list[Any] = [kind, shape]
            for name in names:
                found = one.get(name, {})
                rate = f"{found['gbs']:,} GB/s" if "gbs" in found else f"{found['tflops']} TFLOP/s" if found else ""
                row += [found.get("us"), rate]
            if {"flashinfer", "triton"} <= set(one):
                row.append(round(one["triton"]["us"] / one["flashinfer"]["us"], 2))
            rows.append(row)
    head = ["kind", "rows x tokens", *(part for name in names for part in (f"{name} us", "rate"))]
    head += ["triton / flashinfer"] if any(len(row) > len(head) for row in rows) else []
    yield from _table(head, [row + [None] * (len(head) - len(row)) for row in rows])


def _bubbles(bubbles: Found) -> Iterator[str]:
    if "runs" not in bubbles:
        return
    yield f"## Overlap, {bubbles['backend']}"
    yield ""
    columns = (
        "idle_share gap_us_median gap_us_max decode_us_median period_us_median output_tokens_per_s decodes_in_a_row"
    )
    rows, host, parts = [], [], ()
    for count, runs in bubbles["runs"].items():
        for name, run in runs.items():
            share = None if run["idle_share"] is None else f"{run['idle_share']:.2%}"
            true = bubbles.get("profiled", {}).get(count, {}).get(name, {}).get("idle_share")
            true = None if true is None else f"{true:.2%}"
            rows.append((int(count), name, true, share, *(run[column] for column in columns.split()[1:])))
            host.append((int(count), name, *run["host_us_per_batch"].values()))
            parts = tuple(run["host_us_per_batch"])
    yield from _table(
        (
            "requests",
            "",
            "idle by kernels",
            "idle by events",
            "gap us",
            "longest gap",
            "decode us",
            "period us",
            "output tokens/s",
            "decodes in a row",
        ),
        rows,
    )
    yield "CPU of the host's loop, microseconds per batch (`fold` has what the engine takes, and launches, in it):"
    yield ""
    yield from _table(("requests", "", *parts), host)


def _pieces(pieces: Found) -> Iterator[str]:
    rows = [
        (name, int(tokens), one["whole_us"], one["pieces_us"], one["whole_cpu_us"], one["pieces_cpu_us"])
        for name, by_tokens in pieces.get("passes", {}).items()
        for tokens, one in by_tokens.items()
    ]
    if rows:
        yield "## Passes in pieces of CUDA graphs"
        yield ""
        yield from _table(("attention", "tokens", "whole, us", "pieces, us", "CPU, whole", "CPU, pieces"), rows)


def _quantized(found: Found) -> Iterator[str]:
    if "products" not in found:
        return
    yield "## Weights and KV in fewer bits"
    yield ""
    yield "The floor is the time in which the stored bytes are read at the bandwidth of a copy; plain is bfloat16."
    yield ""
    yield "Rows in fp8 are rounded within the time shown, and meet weights in fp8: by our kernel, and by torch's."
    yield ""
    ways = ("floor_us", "fused_us", "widened_us", "plain_us", "rounded_us", "rounded_torch_us")
    rows = [
        (kind, shape, int(count), *(one.get(way) for way in ways))
        for kind, shapes in found["products"].items()
        for shape, by_rows in shapes.items()
        for count, one in by_rows.items()
    ]
    heads = ("stored as", "matrix", "rows", "floor us", "widened in tiles us", "copy us", "plain us")
    yield from _table((*heads, "rows in fp8 us", "by torch us"), rows)
    rows = [(kind, count) for kind, count in found.get("change_over_rows", {}).items()]
    yield from _table(("stored as", "rows from which a widened copy wins"), rows)
    rows = [
        (name, shape, *one.values()) for name, shapes in found.get("kv", {}).items() for shape, one in shapes.items()
    ]
    if rows:
        yield from _table(("decodes by", "rows x tokens", "plain us", "KV in fp8 us", "GB/s"), rows)


def _start(start: Found) -> Iterator[str]:
    if "table" not in start:
        return
    yield f"## Memory at start, {start['backend']}, ready after {start.get('seconds')} s"
    yield ""
    yield from ("    " + line for line in start["table"])
    yield ""


def _peer(peer: Found) -> Iterator[str]:
    if "ours" not in peer:
        return
    yield "## Beside transformers"
    yield ""
    work = peer["workload"]
    yield f"{work['requests']} requests of {work['prompt_tokens']} random tokens, {work['output_tokens']} tokens each."
    yield ""
    rows = [("lockstep", peer["ours"]["output_tokens_per_s"])]
    if "transformers" in peer:
        one = peer["transformers"]
        rows.append((f"transformers {one['version']}, {one['attention']}", one["output_tokens_per_s"]))
        rows.append(("ratio", peer.get("ratio")))
    yield from _table(("", "output tokens/s"), rows)


def _kernels(kernels: Found) -> Iterator[str]:
    times = kernels.get("sampling_us", {})
    if not times:
        return
    yield "## Sampling kernels, microseconds"
    yield ""
    names = list(next(iter(times.values())))
    yield from _table(("rows", *names), [(int(rows), *one.values()) for rows, one in times.items()])
    if between := kernels.get("between_us"):
        yield "Between the products of a layer, microseconds in a graph:"
        yield ""
        names = list(next(iter(between.values())))
        yield from _table(("rows", *names), [(int(rows), *one.values()) for rows, one in between.items()])


def _tuning(tuning: Found) -> Iterator[str]:
    if "decode" not in tuning:
        return
    yield "## Decode attention by tile, Triton, GB/s"
    yield ""
    shapes = list(tuning["decode"])
    names = list(dict.fromkeys(name for shape in shapes for name in tuning["decode"][shape]))
    rows = [(name, *(tuning["decode"][shape].get(name, {}).get("gbs") for shape in shapes)) for name in names]
    yield from _table(("tile", *shapes), rows)


def _calibration(tables: Found) -> Iterator[str]:
    if "rows" not in tables:
        return
    yield "## For the simulator"
    yield ""
    yield f"`lockstep simulate --operators operators ...` takes the tables; attention is {tables['backend']}'s."
    yield ""
    yield from _table(("table", "rows"), list(tables["rows"].items()))
    yield from (f"    {command}" for command in tables.get("commands", {}).values())
    yield ""


def _troubles(sections: Found) -> Iterator[str]:
    failed = [
        (name, c["name"], c["detail"]) for name, f in sections.items() for c in f.get("checks", []) if not c["ok"]
    ]
    if failed:
        yield "## Checks that do not hold"
        yield ""
        yield from _table(("section", "check", ""), failed)
    for name, found in sections.items():
        for what, trace in found.get("failures", {}).items():
            yield f"## Failure: {name}, {what}"
            yield ""
            yield from ("    " + line for line in trace.splitlines())
            yield ""
        if "ended" in found:
            yield f"## {name}: {found['ended']}"
            yield ""
            yield from ("    " + line for line in found.get("log", "").splitlines()[-25:])
            yield ""
    skipped = [(name, what, why) for name, found in sections.items() for what, why in found.get("skipped", {}).items()]
    if skipped:
        yield "## Skipped"
        yield ""
        yield from _table(("section", "what", "why"), skipped)
