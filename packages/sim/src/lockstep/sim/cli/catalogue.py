"""`lockstep catalogue`: models, GPUs and engines of the simulator. Argument parsing and printing only."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from lockstep.sim.cli.errors import refusals

WIDTH = 140  # columns of a table that is not shown on a terminal
SETTINGS = {"max_content_width": 120}
_JSON = click.option("--json", "as_json", is_flag=True, help="one JSON object instead of tables")


@click.group()
def catalogue() -> None:
    """List, show and compare the models, GPUs and engines of the simulator, each number with its source."""


@catalogue.command(context_settings=SETTINGS)
@click.argument("names", nargs=-1, metavar="[NAME|PATH|WORD]...")
@click.option("--gpus", default="", metavar="NAMES", help="only these GPUs: h100,h200 or a file  [default: all]")
@_JSON
def models(names: tuple[str, ...], gpus: str, as_json: bool) -> None:
    """List models, or show and compare the named ones: parameters, KV, and the room left on each GPU.

    A name is that of the catalogue or the path of a config.json. Other words select by letters.

    \b
    lockstep catalogue models qwen3
    lockstep catalogue models qwen3-8b llama-3.1-8b --gpus h100,h200,l4
    lockstep catalogue models model/config.json
    """
    with refusals():
        from lockstep.sim.catalogue import gpu_names, load_gpu, load_model, model_names
        from lockstep.sim.catalogue.listing import model_facts, room_on

        chosen = _chosen(names, model_names(), load_model)
        cards = [load_gpu(name.strip()) for name in (gpus.split(",") if gpus else gpu_names())]
        loaded = [load_model(name) for name in chosen]
        shown = len(loaded) <= 4 and bool(names)
        facts = [model_facts(model) | ({"room": room_on(model, cards)} if shown else {}) for model in loaded]
    if as_json:
        _print_json({"models": facts})
        return
    console = _console()
    table = Table(box=None, pad_edge=False)
    for title in ("model", "parameters", "active", "weights", "KV per token", "state per request", "context"):
        table.add_column(title, justify="left" if title == "model" else "right")
    for one in facts:
        dtype = one["checkpoint_dtype"]
        table.add_row(
            one["name"],
            _count(one["params"]),
            _count(one["active_params"]),
            f"{one['weights_bytes'][dtype] / 1e9:.1f} GB {dtype}",
            f"{one['kv_bytes_per_token']['bf16'] / 1024:.1f} KiB" if one["kv_bytes_per_token"]["bf16"] else "-",
            f"{one['state_bytes_per_request'] / 2**20:.1f} MiB" if one["state_bytes_per_request"] else "-",
            f"{one['context_tokens_max']:,}",
        )
    console.print(table)
    if not shown:
        click.echo(
            f"{len(facts)} models; KV in bf16. Details, and the room on each GPU: lockstep catalogue models NAME"
        )
        return
    for one in facts:
        click.echo(f"\n{one['name']}, read as {one['architecture']} ({one['source']})")
        for line in one["modelled_as"]:
            click.echo(f"  {line}")
    click.echo("")
    console.print(_room_table(facts))
    click.echo("The fewest GPUs that hold the weights, 0.9 of their memory in use; KV in bf16.")


def _room_table(facts: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("GPU")
    for one in facts:
        table.add_column(f"{one['name']}: GPUs", justify="right")
        table.add_column("tokens of KV", justify="right")
    for rows in zip(*(one["room"] for one in facts), strict=True):
        cells = [rows[0]["gpu"]]
        for row in rows:
            tokens = f"{row['kv_tokens']:,}" if row["kv_tokens"] else "-"
            cells += [f"{row['tp']}", tokens] if row["tp"] else ["too large", "-"]
        table.add_row(*cells)
    return table


@catalogue.command(context_settings=SETTINGS)
@click.argument("names", nargs=-1, metavar="[NAME|PATH|WORD]...")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="FILE", help="write one GPU as a file to edit: --gpu FILE"
)
@_JSON
def gpus(names: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """List GPUs, or show and compare the named ones: rates, memory, links, prices, power.

    \b
    lockstep catalogue gpus
    lockstep catalogue gpus h100 h200 mi300x
    lockstep catalogue gpus h100 -o card.json     # then: lockstep simulate --gpu card.json
    """
    with refusals():
        from lockstep.sim.catalogue import gpu_entry, gpu_names, load_gpu
        from lockstep.sim.catalogue.listing import gpu_facts

        chosen = _chosen(names, gpu_names(), load_gpu)
        if out is not None:
            _write_entry(chosen, out, gpu_entry)
            return
        facts = [gpu_facts(load_gpu(name)) for name in chosen]
    if as_json:
        _print_json({"gpus": facts})
        return
    table = Table(box=None, pad_edge=False)
    columns = (
        "GPU",
        "memory",
        "GB/s",
        "bf16",
        "fp8",
        "fp4 TFLOPS",
        "link GB/s",
        "domain",
        "W",
        "USD per hour",
        "basis",
    )
    for title in columns:
        table.add_column(title, justify="left" if title in ("GPU", "basis") else "right")
    for one in facts:
        sheet = {name: field["value"] for name, field in one["datasheet"].items()}
        prices = sorted(field["value"] for field in one["usd_per_gpu_hour"].values())
        rates = [f"{sheet[name]:g}" if name in sheet else "-" for name in ("bf16_tflops", "fp8_tflops", "fp4_tflops")]
        table.add_row(
            one["name"],
            f"{sheet['memory_bytes'] / 1e9:.0f} GB",
            f"{sheet['memory_gbs']:g}",
            *rates,
            f"{sheet.get('scale_up_gbs', sheet['pcie_gbs']):g}" + ("" if "scale_up_gbs" in sheet else " PCIe"),
            f"{one['scale_up_gpus']}",
            f"{sheet['power_w']:g}" if "power_w" in sheet else "-",
            f"{prices[0]:.2f}-{prices[-1]:.2f}" if prices else "-",
            one["basis"],
        )
    _console().print(table)
    click.echo("Dense rates of data sheets. public figures: no kernel of this card was measured.")
    if names and len(facts) <= 4:
        for one in facts:
            click.echo(f"\n{one['name']} ({one['architecture']}, also {', '.join(one['aliases']) or 'no other name'})")
            for section in ("datasheet", "measured", "usd_per_gpu_hour"):
                for name, field in one[section].items():
                    click.echo(f"  {section}.{name} = {field['value']:g}  ({field['source']})")
            for note in one["notes"]:
                click.echo(f"  note: {note}")


def _write_entry(chosen: Sequence[str], out: Path, entry_of: Callable[[str], dict[str, Any]]) -> None:
    """Write the entry of the one chosen GPU. Raises UsageError for several, or if the file exists."""
    if len(chosen) != 1:
        raise click.UsageError(f"--out writes one GPU, got {len(chosen)}\nhint: name one, such as h100")
    if out.exists():
        raise click.UsageError(f"{out} exists\nhint: choose another --out")
    out.write_text(json.dumps(entry_of(chosen[0]), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    click.echo(f"{out} written, {out.stat().st_size:,} bytes", err=True)


@catalogue.command(context_settings=SETTINGS)
@click.argument("names", nargs=-1, metavar="[NAME|WORD]...")
@_JSON
def engines(names: tuple[str, ...], as_json: bool) -> None:
    """List engines, or show the named ones: releases, what their costs were fitted to, and their errors on each GPU.

    \b
    lockstep catalogue engines
    lockstep catalogue engines vllm
    """
    with refusals():
        from lockstep.sim.catalogue import engine_names, load_engine
        from lockstep.sim.catalogue.listing import engine_facts

        facts = [engine_facts(name) for name in _chosen(names, engine_names(), load_engine)]
    if as_json:
        _print_json({"engines": facts})
        return
    for one in facts:
        click.echo(f"{one['name']}: {one['title']}, release {one['release']} unless --engine {one['name']}@RELEASE")
        pairs = {(found["model"], found["gpu"]) for found in one["fitted"]}
        of_models, cards = sorted({model for model, _ in pairs}), {gpu for _, gpu in pairs}
        click.echo(f"  fitted {one['date']} on {len(pairs)} pairs of {len(of_models)} models and {len(cards)} GPUs")
        if names:
            for label in ("fitted_on", "errors", "not_for"):
                click.echo(f"  {label.replace('_', ' ')}: {one[label]}")
            click.echo(
                f"  releases with costs of their own from: {', '.join(one['releases_with_own_costs']) or 'none'}"
            )
            click.echo(f"  models: {', '.join(of_models)}")
            for card in one["gpus"]:
                click.echo(f"  {card['gpu']}: {card['fitted_on']}; {card['errors']}; not for {card['not_for']}")


def _chosen(names: Sequence[str], known: Sequence[str], load: Callable[[str], object]) -> list[str]:
    """Return the entries that the arguments name, and those whose names contain an argument that names none.

    Raises: UsageError for an argument that is neither; the error of `load` for a file that is malformed.
    """
    from lockstep.sim.catalogue.listing import is_file
    from lockstep.sim.cost.errors import CatalogueError

    found: list[str] = []
    for name in names:
        if is_file(name):
            load(name)
            found.append(name)
            continue
        matching = [one for one in known if name.lower() in one.lower()]
        try:
            load(name)
            found.append(name)
        except CatalogueError as error:
            if not matching:
                raise click.UsageError(str(error)) from None
            found += matching
    return list(dict.fromkeys(found)) if names else list(known)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.0f} M"


def _print_json(found: dict[str, Any]) -> None:
    click.echo(json.dumps(found, indent=2, allow_nan=False, ensure_ascii=False))
