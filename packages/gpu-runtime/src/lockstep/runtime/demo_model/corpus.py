"""The training text of the demo model: text that is part of every Python installation.

The text consists of the documentation strings of the standard library, the language reference behind `help()`, and the
licence. A documentation string becomes a short conversation, so that the model learns the form of its chat template.
All other text, and every documentation string a second time, is plain text. All of it is the Python Software
Foundation's, under the PSF License Agreement; it is read from the installed Python and not stored.
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
SHORTEST_CHARS = 40  # shorter documentation strings make no conversation
QUESTIONS = ("What does {name} do?", "Explain {name}.", "What is {name}?", "Tell me about {name}.")


@dataclass(frozen=True, slots=True)
class Passage:
    """A text, and the question that it answers, if any."""

    text: str
    question: str | None = None


def passages(library: Path | None = None) -> list[Passage]:
    """Return all passages of one Python's standard library, in an order that depends only on its files.

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
        except SyntaxError:  # a template, for example
            continue
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for name, text in _strings(tree, module):
            yield Passage(text)
            if len(text) >= SHORTEST_CHARS and not name.rpartition(".")[2].startswith("_"):
                # The question depends only on the name, so that a new module changes no other question.
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
    """Yield the language reference: a module with one statement, which assigns a dict of texts.

    It is parsed, not run.
    """
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
