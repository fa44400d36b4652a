"""Options declared once, beside the field that holds the value: flags, command lines and tables derive from them.

    @dataclass
    class Scenario:
        tp: Annotated[int, Option("GPUs that share one copy of the model")] = 1

    options_of(Scenario)["tp"].words(2)                       # ["--tp", "2"]
    command = with_flags(click.option, options_of(Scenario).values())(command)

A struct is a dataclass or a msgspec.Struct. Its fields that carry an `Option` are options. This module imports no
command line library: the library's `option` decorator is passed in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

Command = TypeVar("Command", bound=Callable[..., Any])
Given = TypeVar("Given")


class _Required:
    """The default of an option without a default."""

    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@dataclass(frozen=True)
class Option:
    """The declaration of a field as an option of command lines and tables.

    Args:
        help: text of the flag, in one line, with the unit if the field's name does not carry it.
        flag: replaces the flag that follows from the field's name.
        short: an additional flag of one letter.
        metavar: placeholder of the value in help.
        default: the meaning of an absent flag, in place of the field's default.
        commands: the commands that take the option; empty: every command that takes options of the struct.
        choices: texts that the value may be, if its type is no Literal.
        separator: the flag may be repeated, and this text joins the values into one.
        negatable: the switch also has `--no-FLAG`.
        text: writes the value as the one word of the flag. Such a flag arrives as text, or as None if it is absent.
    """

    help: str
    _: KW_ONLY
    flag: str = ""
    short: str = ""
    metavar: str = ""
    default: str = ""
    commands: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    separator: str = ""
    negatable: bool = False
    text: Callable[[Any], str] | None = None


@dataclass(frozen=True)
class OptionField:
    """A field with its option.

    Args:
        kind: bool, int, float, str, dict, or the class of the value; for a tuple, of its items.
        multiple: the value is a tuple, and the flag may be repeated.
        default: default of the field; REQUIRED without a default.
        choices: the texts that the field's type admits; empty if it is no Literal.
    """

    name: str
    kind: Any
    multiple: bool
    default: Any
    choices: tuple[str, ...]
    option: Option

    @property
    def flag(self) -> str:
        """The flag of the field: `--page-size` for `page_size`, `--waiting-timeout` for `waiting_timeout_us`."""
        return self.option.flag or option_of(self.name)

    def absent(self, meaning: str) -> OptionField:
        """Return the option without its default: not given, it arrives as None, and help shows this meaning."""
        return replace(self, default=None, option=replace(self.option, default=meaning))

    def takes(self, command: str) -> bool:
        """Whether a command has this option."""
        return not self.option.commands or command in self.option.commands

    def words(self, value: Any) -> list[str]:
        """Return the words of a command line that set this value."""
        if self.option.text is not None:
            return [self.flag, self.option.text(value)]
        if self.kind is bool:
            return [self.flag if value else f"--no-{self.flag[2:]}"]
        if self.kind is dict:
            return [word for name, one in value.items() for word in setting_words(name, one)]
        if self.multiple:
            return [word for one in value for word in (self.flag, str(one))]
        return [self.flag, value_word(self.name, value)]

    def default_text(self) -> str:
        """Return the default for help and tables; "" for an option that is required, off or empty."""
        if self.option.default:
            return self.option.default
        if self.default is REQUIRED or self.default is False or self.default in (None, (), {}, ""):
            return ""
        return f"{value_word(self.name, self.default)}"


def number_word(value: float) -> str:
    """Return the shortest text that reads back as the same number."""
    return word if float(word := f"{value:g}") == value else repr(value)


def option_of(name: str) -> str:
    """Return the flag of a field: `--page-size` for `page_size`. A `_us` is dropped: `--waiting-timeout 30s`."""
    return "--" + name.removesuffix("_us").replace("_", "-")


def value_word(name: str, value: Any) -> str:
    """Return a value as one word: `none`, a number, a text, or a time in microseconds with its unit."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return number_word(value)
    return f"{value}us" if name.endswith("_us") else str(value)


def setting_words(name: str, value: Any) -> list[str]:
    """Return the words of a command line for a named setting of the scheduler or of the memory tiers."""
    option = option_of(name)
    if isinstance(value, bool):
        return [option if value else "--no-" + option.removeprefix("--")]
    if isinstance(value, tuple):
        return [word for item in value for word in (option.removesuffix("s"), str(item))]
    if value is None:
        return [option, "none"]
    return [option, f"{value}us" if name.endswith("_us") else str(value)]


def options_of(struct: type) -> Mapping[str, OptionField]:
    """Return the options of a struct by the names of their fields, in the order of the fields."""
    if struct not in _FOUND:
        _FOUND[struct] = _options_in(struct)
    return _FOUND[struct]


_FOUND: dict[type, Mapping[str, OptionField]] = {}
"""Cache of options by struct: reading annotations takes a millisecond, and trials of a plan need options often."""


def _options_in(struct: type) -> Mapping[str, OptionField]:
    found: dict[str, OptionField] = {}
    hints = get_type_hints(struct, include_extras=True)
    for name, default in _defaults(struct).items():
        hint = hints[name]
        if get_origin(hint) is Annotated:
            kind, *notes = get_args(hint)
            for option in (note for note in notes if isinstance(note, Option)):
                kind, multiple, choices = _kind_of(kind)
                found[name] = OptionField(name, kind, multiple, default, option.choices or choices, option)
    return found


def _defaults(struct: type) -> dict[str, Any]:
    """Return defaults by field, in the order of the fields."""
    if dataclasses.is_dataclass(struct):
        return {
            field.name: field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else REQUIRED
            if field.default is dataclasses.MISSING
            else field.default
            for field in dataclasses.fields(struct)
        }
    return {
        field.name: field.default_factory()
        if field.default_factory is not msgspec.NODEFAULT
        else REQUIRED
        if field.required
        else field.default
        for field in msgspec.structs.fields(struct)
    }


def _kind_of(hint: Any) -> tuple[Any, bool, tuple[str, ...]]:
    """Return `kind`, `multiple` and `choices` of an OptionField with this type."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(one for one in get_args(hint) if one is not NoneType)  # a command line sets the first type
    if get_origin(hint) is tuple:
        kind, _, choices = _kind_of(get_args(hint)[0])
        return kind, True, choices
    if get_origin(hint) is Literal:
        return str, False, get_args(hint)
    origin = get_origin(hint) or hint
    return (dict if isinstance(origin, type) and issubclass(origin, Mapping) else origin), False, ()


def with_flags(
    option: Callable[..., Callable[[Command], Command]],
    fields: Iterable[OptionField],
    *,
    keep_absent: bool = False,
    kinds: Mapping[str, Any] | None = None,
    choice: Callable[[tuple[str, ...]], Any] | None = None,
) -> Callable[[Command], Command]:
    """Return a decorator that adds one flag to a command for each field, in order; fields of kind dict have no flag.

    Args:
        option: `click.option`.
        keep_absent: an absent flag arrives as None, or as () if it may be repeated, and not as the field's default.
            Help shows the default in both cases.
        kinds: types of values by the end of a field's name, such as `_us`.
        choice: `click.Choice`, for fields of a Literal; None: the struct checks their texts.
    """
    made = [option(*_declared(field), **_arguments(field, keep_absent, kinds or {}, choice)) for field in fields
            if field.kind is not dict]  # fmt: skip

    def decorate(command: Command) -> Command:
        for one in reversed(made):
            command = one(command)
        return command

    return decorate


def take(struct: type[Given], given: dict[str, Any]) -> Given:
    """Remove the options of a struct from the arguments of a command, by name; return the struct."""
    return struct(**{name: given.pop(name) for name in options_of(struct)})


def _declared(field: OptionField) -> tuple[str, ...]:
    negated = f"/--no-{field.flag[2:]}" if field.kind is bool and field.option.negatable else ""
    return *filter(None, [field.option.short]), field.flag + negated, field.name


def _arguments(
    field: OptionField, keep_absent: bool, kinds: Mapping[str, Any], choice: Callable[[tuple[str, ...]], Any] | None
) -> dict[str, Any]:
    """Return the keyword arguments of `click.option` for a field."""
    text, shown = field.option.help, field.default_text()
    several = field.multiple or bool(field.option.separator)
    if keep_absent or field.option.default:
        text += f"  [default: {shown}]" if shown else ""
    arguments: dict[str, Any] = {"help": text}
    if field.option.metavar:
        arguments["metavar"] = field.option.metavar
    if field.option.text is not None:
        return arguments
    if field.kind is bool:
        switch = {} if field.option.negatable else {"is_flag": True}
        return arguments | switch | {"default": None if keep_absent else field.default}
    kind = next((kind for end, kind in kinds.items() if field.name.endswith(end)), None)
    if kind is None:
        kind = choice(field.choices) if choice is not None and field.choices else field.kind
    if kind in (int, float, str) or not isinstance(kind, type):
        arguments["type"] = kind
    elif issubclass(kind, Path):
        arguments["type"] = kind  # a callable that the command line library applies to the word
    if several:
        arguments["multiple"] = True
    if field.option.separator:
        arguments["callback"] = _joined(field.option.separator)
    if field.default is REQUIRED:
        arguments["required"] = True
    elif keep_absent:
        arguments["default"] = None
    elif field.multiple and field.default:
        arguments["default"] = field.default
    elif not several and field.default is not None:
        read = any(field.name.endswith(end) for end in kinds)  # the kind then reads the default as text
        arguments["default"] = value_word(field.name, field.default) if read else field.default
    return arguments


def _joined(separator: str) -> Callable[[Any, Any, tuple[str, ...]], str | None]:
    return lambda context, parameter, given: separator.join(given) or None


def changed_words(value: Any, *, always: Iterable[str] = (), leave_out: Iterable[str] = ()) -> list[str]:
    """Return the words of a command line for every option of a struct whose value is not its default.

    Options with one value come first, then switches, then settings and repeated flags, each in the order of the fields.

    Args:
        always: names of options that are also written at their default.
        leave_out: names of options that are not written.
    """
    fields = [field for field in options_of(type(value)).values() if field.name not in tuple(leave_out)]
    given = [field for field in fields if field.name in tuple(always) or getattr(value, field.name) != field.default]
    order = sorted(given, key=lambda field: 0 if _has_value(field) else 1 if field.kind is bool else 2)
    return [word for field in order for word in field.words(getattr(value, field.name))]


def _has_value(field: OptionField) -> bool:
    return field.kind is not bool and field.kind is not dict and not field.multiple


def option_table(fields: Iterable[OptionField]) -> str:
    """Return a table of options in Markdown: flag, default, meaning. Fields of kind dict have no flag and no row."""
    shown = [field for field in fields if field.kind is not dict]
    rows = [f"| `{field.flag}` | {_cell(field)} | {_escaped(field.option.help)} |" for field in shown]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])


def _escaped(text: str) -> str:
    """Escape bars, which would end a cell."""
    return text.replace("|", "\\|")


def _cell(field: OptionField) -> str:
    if field.default is REQUIRED:
        return "required"
    text = field.default_text()
    return f"`{text}`" if text and not field.option.default else text or ("off" if field.kind is bool else "none")
