"""What the demo model learns from: text that every Python carries.

Documentation strings of the standard library, the language reference behind `help()`, and the licence. A documentation
string becomes a short conversation, so that the model answers in the form of its chat template; everything else, and
every documentation string once more, is plain text. All of it is the Python Software Foundation's, under the PSF
License Agreement; it is read where Python is installed and not kept.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Packages that are no part of the documentation, or not of every Python.
LEFT_OUT = frozenset(
    "__pycache__ ensurepip idlelib lib2to3 lib-dynload pydoc_data site-packages test tests turtledemo".split()
)
SHORTEST_CHARS = 40  # of a documentation string that is worth a conversation
QUESTIONS = ("What does {name} do?", "Explain {name}.", "What is {name}?", "Tell me about {name}.")


@dataclass(frozen=True, slots=True)
class Passage:
    """A text, and the question that it answers, if any."""

    text: str
    question: str | None = None


def passages(library: Path | None = None) -> list[Passage]:
    """All passages of one Python's standard library, in an order that depends on nothing but its files.

    Raises: FileNotFoundError if the folder holds no documentation strings.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    found = [*_documented(library), *_topics(library), *_licence(library)]
    if not found:
        raise FileNotFoundError(f"no documentation strings under {library}\nhint: name the folder that holds `os.py`")
    unique = {(passage.question, passage.text): passage for passage in found}
    return list(unique.values())


def _documented(library: Path) -> Iterator[Passage]:
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if LEFT_OUT.intersection(parts[:-1]) or not path.is_file():
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # templates and the like
            continue
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for name, text in _strings(tree, module):
            yield Passage(text)
            if len(text) >= SHORTEST_CHARS and not name.rpartition(".")[2].startswith("_"):
                # The question follows from the name, so that adding a module changes nothing elsewhere.
                yield Passage(text, QUESTIONS[sum(name.encode()) % len(QUESTIONS)].format(name=name))


def _strings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text and text.strip():
            yield name, inspect.cleandoc(text)
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _strings(child, f"{name}.{child.name}")


def _topics(library: Path) -> Iterator[Passage]:
    """The language reference: a module with one statement, which assigns a dict of texts. It is read, not run."""
    path = library / "pydoc_data" / "topics.py"
    if not path.is_file():
        return
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            for _, text in sorted(topics.items()):
                yield Passage(inspect.cleandoc(text))


def _licence(library: Path) -> Iterator[Passage]:
    for path in (library / "LICENSE.txt", library.parent.parent / "LICENSE.txt"):
        if path.is_file():
            yield Passage(path.read_text(encoding="utf-8").strip())
            return
