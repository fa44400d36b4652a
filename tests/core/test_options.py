"""Options declared beside their fields: words of a command line, flags of a command, and tables follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from lockstep.host.options import (
    REQUIRED,
    Option,
    changed_words,
    number_word,
    option_table,
    options_of,
    setting_words,
    take,
    value_word,
    with_flags,
)


@dataclass(kw_only=True)
class EveryKind:
    """A struct with an option of every kind."""

    needed: Annotated[int, Option("Needed.")]
    pages: Annotated[int, Option("Pages.", short="-p", metavar="PAGES")] = 4
    zero: Annotated[int, Option("None | of them.")] = 0
    share: Annotated[float, Option("Share.", commands=("plan",))] = 0.5
    wait_us: Annotated[int, Option("Time.")] = 30
    name: Annotated[str | None, Option("Name.", default="that of the folder")] = None
    absent: Annotated[int | None, Option("Absent.")] = None
    mode: Annotated[Literal["fast", "slow"], Option("Mode.")] = "fast"
    named: Annotated[str, Option("Named.", choices=("x", "y"))] = "x"
    quiet: Annotated[bool, Option("Quiet.")] = False
    cache: Annotated[bool, Option("Cache.", negatable=True)] = True
    paths: Annotated[tuple[Path, ...], Option("Files.", flag="--path")] = ()
    modes: Annotated[tuple[Literal["a", "b"], ...], Option("Modes.")] = ("a",)
    joined: Annotated[str | None, Option("Parts.", separator=",")] = None
    raw: Annotated[bytes, Option("Raw.")] = b"r"
    pair: Annotated[tuple[int, int], Option("Pair.", text=lambda pair: f"{pair[0]}:{pair[1]}")] = (1, 2)
    settings: Annotated[Mapping[str, Any], Option("Settings.")] = field(default_factory=dict)
    other: int = 3  # no option
    noted: Annotated[int, "a note"] = 3  # no option either


FIELDS = options_of(EveryKind)


def test_options_are_the_fields_with_a_declaration_in_their_order() -> None:
    assert list(FIELDS) == [name for name in EveryKind.__annotations__ if name not in ("other", "noted")]
    assert options_of(EveryKind) is FIELDS
    kinds = {name: (one.kind, one.multiple, one.choices) for name, one in FIELDS.items()}
    assert kinds["absent"] == (int, False, ())
    assert kinds["mode"] == (str, False, ("fast", "slow"))
    assert kinds["named"] == (str, False, ("x", "y"))
    assert kinds["paths"] == (Path, True, ())
    assert kinds["modes"] == (str, True, ("a", "b"))
    assert kinds["settings"] == (dict, False, ())
    assert {one.default for name, one in FIELDS.items() if name in ("needed", "pages")} == {REQUIRED, 4}
    assert FIELDS["settings"].default == {}
    assert FIELDS["share"].takes("plan")
    assert not FIELDS["share"].takes("simulate")
    assert FIELDS["pages"].takes("simulate")


def test_options_of_a_struct_of_msgspec_are_read_alike() -> None:
    class MadeOptions(msgspec.Struct, kw_only=True):
        needed: Annotated[int, Option("Needed.")]
        pages: Annotated[int, Option("Pages.")] = 4
        settings: Annotated[dict[str, int], Option("Settings.")] = msgspec.field(default_factory=lambda: {"a": 1})

    assert [one.default for one in options_of(MadeOptions).values()] == [REQUIRED, 4, {"a": 1}]
    given = {"needed": 1, "pages": 2, "settings": {}, "unknown": 5}
    assert take(MadeOptions, given) == MadeOptions(needed=1, pages=2, settings={})
    assert given == {"unknown": 5}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("pages", 5, ["--pages", "5"]),
        ("share", 1 / 3, ["--share", "0.3333333333333333"]),
        ("wait_us", 7, ["--wait", "7us"]),
        ("name", None, ["--name", "none"]),
        ("quiet", True, ["--quiet"]),
        ("quiet", False, ["--no-quiet"]),
        ("paths", (Path("a"), Path("b")), ["--path", "a", "--path", "b"]),
        ("pair", (3, 4), ["--pair", "3:4"]),
        ("settings", {"a_b": True, "c": False}, ["--a-b", "--no-c"]),
        ("settings", {"n": None, "t_us": 3, "f": 0.5, "ids": (1, 2)},
         ["--n", "none", "--t", "3us", "--f", "0.5", "--id", "1", "--id", "2"]),
    ],
)  # fmt: skip
def test_a_value_is_written_as_the_words_that_set_it(name: str, value: Any, words: list[str]) -> None:
    assert FIELDS[name].words(value) == words


def test_numbers_are_written_as_short_as_they_read_back() -> None:
    assert [number_word(one) for one in (0.5, 1e9, 2.0, 0.1234567)] == ["0.5", "1e+09", "2", "0.1234567"]
    assert [value_word("a_us", one) for one in (None, 2.0, 2, "x")] == ["none", "2", "2us", "xus"]
    assert setting_words("a_us", 2) == ["--a", "2us"]


def test_a_command_line_has_what_differs_values_first_then_switches_then_what_repeats() -> None:
    changed = EveryKind(needed=1, pages=5, quiet=True, cache=False, paths=(Path("a"),), settings={"a": 1}, joined="x,y")
    values = ["--needed", "1", "--pages", "5", "--joined", "x,y"]
    switches, repeated = ["--quiet", "--no-cache"], ["--path", "a", "--a", "1"]
    assert changed_words(changed) == values + switches + repeated
    assert changed_words(changed, leave_out=("joined", "cache", "paths", "settings")) == [*values[:4], "--quiet"]
    assert changed_words(EveryKind(needed=1), always=["zero"]) == ["--needed", "1", "--zero", "0"]


def declared(**given: Any) -> dict[str, tuple[tuple[str, ...], dict[str, Any]]]:
    """Return the arguments of `click.option` by field."""
    made: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {}
    order: list[str] = []

    def option(*words: str, **arguments: Any) -> Callable[[Any], Any]:
        made[words[-1]] = words[:-1], arguments

        def decorate(command: Any) -> Any:
            order.append(words[-1])
            return command

        return decorate

    assert with_flags(option, FIELDS.values(), **given)(len) is len
    assert order == [*reversed([name for name in FIELDS if name != "settings"])]
    return made


def test_flags_of_a_command() -> None:
    made = declared(kinds={"_us": "a time"}, choice=lambda texts: f"one of {' '.join(texts)}")
    _, joined = made.pop("joined")
    callback = joined.pop("callback")
    assert joined == {"help": "Parts.", "type": str, "multiple": True}
    assert [callback(None, None, given) for given in (("a", "b"), ("a",), ())] == ["a,b", "a", None]
    assert made == {
        "needed": (("--needed",), {"help": "Needed.", "type": int, "required": True}),
        "pages": (("-p", "--pages"), {"help": "Pages.", "metavar": "PAGES", "type": int, "default": 4}),
        "zero": (("--zero",), {"help": "None | of them.", "type": int, "default": 0}),
        "share": (("--share",), {"help": "Share.", "type": float, "default": 0.5}),
        "wait_us": (("--wait",), {"help": "Time.", "type": "a time", "default": "30us"}),
        "name": (("--name",), {"help": "Name.  [default: that of the folder]", "type": str}),
        "absent": (("--absent",), {"help": "Absent.", "type": int}),
        "mode": (("--mode",), {"help": "Mode.", "type": "one of fast slow", "default": "fast"}),
        "named": (("--named",), {"help": "Named.", "type": "one of x y", "default": "x"}),
        "quiet": (("--quiet",), {"help": "Quiet.", "is_flag": True, "default": False}),
        "cache": (("--cache/--no-cache",), {"help": "Cache.", "default": True}),
        "paths": (("--path",), {"help": "Files.", "type": Path, "multiple": True}),
        "modes": (("--modes",), {"help": "Modes.", "type": "one of a b", "multiple": True, "default": ("a",)}),
        "raw": (("--raw",), {"help": "Raw.", "default": b"r"}),
        "pair": (("--pair",), {"help": "Pair."}),
    }


def test_flags_whose_absence_is_kept_have_their_default_in_the_help() -> None:
    made = {name: arguments for name, (_, arguments) in declared(keep_absent=True).items()}
    assert made["needed"] == {"help": "Needed.", "type": int, "required": True}
    assert made["pages"]["help"] == "Pages.  [default: 4]"
    assert made["zero"] == {"help": "None | of them.  [default: 0]", "type": int, "default": None}
    assert made["absent"] == {"help": "Absent.", "type": int, "default": None}
    assert made["mode"] == {"help": "Mode.  [default: fast]", "type": str, "default": None}
    assert made["quiet"] == {"help": "Quiet.", "is_flag": True, "default": None}
    assert made["cache"] == {"help": "Cache.  [default: True]", "default": None}
    assert made["wait_us"] == {"help": "Time.  [default: 30us]", "type": int, "default": None}
    absent = FIELDS["pages"].absent("as many as fit")
    assert (absent.default, absent.default_text(), absent.flag) == (None, "as many as fit", "--pages")


def test_the_table_of_options() -> None:
    rows = option_table(
        FIELDS[name] for name in ("needed", "pages", "zero", "name", "absent", "quiet", "cache", "settings")
    )
    assert rows.splitlines() == [
        "| option | default | meaning |",
        "|---|---|---|",
        "| `--needed` | required | Needed. |",
        "| `--pages` | `4` | Pages. |",
        "| `--zero` | `0` | None \\| of them. |",
        "| `--name` | that of the folder | Name. |",
        "| `--absent` | none | Absent. |",
        "| `--quiet` | off | Quiet. |",
        "| `--cache` | `True` | Cache. |",
    ]
