"""How the sources of a checkout hang together: what touches the engine, import cycles, sizes, shared names, wording.

    python benchmarks/structure.py                              the figures of this checkout
    python benchmarks/structure.py ROOT                         those of another one, of whatever age
    python benchmarks/structure.py ROOT --against OTHER         both, side by side
    python benchmarks/structure.py --details "engine stores"    the places of one figure
    python benchmarks/structure.py --by-file "guards in engine" how many of them each file has

Files are read, never imported. `tests/support/structure.py` defines the figures; `tests/core/test_structure.py` holds
them against bounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.structure import ENGINE_TYPES, Figure, by_file, measure

HERE = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=HERE, help="a checkout (default: this one)")
    parser.add_argument("--against", type=Path, metavar="OTHER", help="another checkout, shown in a column of its own")
    parser.add_argument("--details", metavar="NAME", help="list the places of this figure")
    parser.add_argument("--by-file", metavar="NAME", help="list how many places of this figure each file has")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument(
        "--engine-types",
        default=",".join(ENGINE_TYPES),
        metavar="NAMES",
        help="classes, as parameter types, that stand for the engine (default %(default)s)",
    )
    arguments = parser.parse_args()
    types = arguments.engine_types.split(",")
    figures = measure(arguments.root, types)
    if not figures["modules"].value:
        print(
            f"{arguments.root} has no Python files under packages/*/src/lockstep or tools/src/lockstep", file=sys.stderr
        )
        return 2
    name = arguments.details or arguments.by_file
    if name is not None and name not in figures:
        print(f"no figure `{name}`; there are {', '.join(figures)}", file=sys.stderr)
        return 2
    if arguments.details is not None:
        print(*figures[name].places, sep="\n")
    elif arguments.by_file is not None:
        for path, count in by_file(figures[name]):
            print(f"{count:6,}  {path}")
    elif arguments.json:
        print(json.dumps({figure.name: figure.value for figure in figures.values()}, indent=1))
    else:
        show(figures, measure(arguments.against, types) if arguments.against is not None else None)
    return 0


def show(figures: dict[str, Figure], others: dict[str, Figure] | None) -> None:
    """Print one line per figure: value, what it is a part of, the value of the other checkout, meaning."""
    head = "" if others is None else f"{'against':>9}"
    print(f"{'figure':24}{'value':>7}{'of':>8}{head}  meaning")
    for name, figure in figures.items():
        whole = "" if figure.of is None else f"{figure.of:,}"
        other = "" if others is None else f"{others[name].value:9,}"
        print(f"{name:24}{figure.value:7,}{whole:>8}{other}  {figure.meaning}")


if __name__ == "__main__":
    sys.exit(main())
