"""The packages of the core form layers: a module imports its own package and packages below it, TYPE_CHECKING included.

Imports inside functions count, too. Each rule is tried on a planted violation.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

CORE = Path(__file__).parents[2] / "packages/sched-core/src/lockstep/core"

LAYERS = ("contract", "cluster", "requests", "kv", "features", "admin", "scheduler", "journal")
"""From the lowest package to the highest.

Modules outside of them (invariants.py, command.py) may import every package.
"""


def imports(source: str) -> Iterator[str]:
    """Modules of the core that a source imports, without the leading `lockstep.core.`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep.core"):
            module = (node.module or "").removeprefix("lockstep.core").removeprefix(".")
            yield from (f"{module}.{alias.name}".removeprefix(".") for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from (name.removeprefix("lockstep.core.") for name in names if name.startswith("lockstep.core."))


def violations(module: str, source: str) -> list[str]:
    """Imports of a module, as `package.name`, that lead upwards."""
    own = LAYERS.index(module.partition(".")[0])
    found = []
    for name in imports(source):
        room = name.partition(".")[0]
        if room in LAYERS and LAYERS.index(room) > own:
            found.append(f"{module} imports {name}")
    return found


def test_every_room_imports_itself_and_lower_rooms_only() -> None:
    found: list[str] = []
    for room in LAYERS:
        for path in sorted((CORE / room).glob("*.py")):
            found += violations(f"{room}.{path.stem}", path.read_text())
    assert not found


def test_every_room_has_a_layer() -> None:
    rooms = {path.parent.name for path in CORE.glob("*/__init__.py")}
    assert rooms == set(LAYERS)


def test_features_do_not_import_the_scheduler_in_any_way() -> None:
    planted = "if TYPE_CHECKING:\n    from lockstep.core.scheduler.engine import Engine\n"
    assert violations("features.sessions", planted) == ["features.sessions imports scheduler.engine.Engine"]
    assert violations("features.sessions", "def f():\n    import lockstep.core.journal.replay\n")
    assert not violations("scheduler.engine", "from lockstep.core.features.sessions import Sessions\n")
