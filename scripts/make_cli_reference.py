"""Write ``docs/cli.md`` from the application itself: ``make docs``.

``python scripts/make_cli_reference.py --check`` writes nothing and exits with 1 where the page is
not what the application says.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer.main

from mfsdp_cli.cli import app
from mfsdp_cli.output import output

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
_TYPES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
_HEAD = """\
# Command line reference

Generated from the application by `make docs`; a test checks that it is current. What the commands
are for is in the [README](../README.md), the words are in [concepts](concepts.md), the codes in
[errors](errors.md).

Every command takes `--help`. Exit codes: 0 all well; 1 the command worked and found a problem;
2 wrong usage or unreadable input; 3 an internal fault; 130 interrupted. Data goes to stdout;
progress, warnings, errors and hints go to stderr. `NO_COLOR` is respected. `MFSDP_DEBUG=1` shows
the traceback of an error.
"""


def reference() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(app)
    written: dict[tuple[str, ...], str] = {}
    commands = [_command(name, command, written) for name, command in group.commands.items()]
    return "\n".join([_HEAD, *commands])


def _command(name: str, command: Any, written: dict[tuple[str, ...], str]) -> str:
    """One command; a table of options that another command has is not written twice."""
    arguments = [p for p in command.params if p.param_type_name == "argument" and not p.hidden]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    usage = " ".join(_usage(argument) for argument in arguments)
    lines = [f"## mfsdp {name}", "", "```text", f"mfsdp {name} [OPTIONS] {usage}", "```", ""]
    lines += [_text(" ".join((command.help or "").split())), ""]
    lines += _table(("argument", "meaning"), map(_argument, arguments))
    for panel in dict.fromkeys(option.rich_help_panel for option in options):
        title = f"{name}: {panel or 'options'}"
        rows = [_row(option) for option in options if option.rich_help_panel == panel]
        table = tuple(_table(("option", "value", "default", "meaning"), rows))
        first = written.setdefault(table, title)
        same = (f"The same as [{first}](#{_anchor(first)}).", "")
        lines += [f"### {title}", "", *(table if first == title else same)]
    return "\n".join(lines)


def _anchor(title: str) -> str:
    """The anchor that a heading gets."""
    kept = "".join(sign for sign in title.lower() if sign.isalnum() or sign in " -_")
    return kept.replace(" ", "-")


def _argument(argument: Any) -> tuple[str, str]:
    shown = _usage(argument).replace("|", "\\|")
    return f"`{shown}`", _text(argument.help or "")


def _usage(argument: Any) -> str:
    shown = argument.metavar or argument.name.upper()
    return str(shown if argument.required or shown.startswith("[") else f"[{shown}]")


def _row(option: Any) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    return names, _value(option), _default(option), _text(option.help or "")


def _value(option: Any) -> str:
    """What an option takes; empty for a switch."""
    if option.is_flag:
        return ""
    if option.metavar:
        return f"`{option.metavar}`"
    kind = option.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    least = "" if option.min is None else f" from {option.min}"
    repeated = ", repeatable" if option.multiple else ""
    return f"`{_TYPES.get(_single(kind), 'TEXT')}`{least}{repeated}"


def _single(kind: Any) -> Any:
    """The type of one value of a list, or the type itself."""
    return kind.__args__[0] if getattr(kind, "__origin__", None) is list else kind


def _default(option: Any) -> str:
    value = option.default
    if value is None or (option.is_flag and not option.secondary_opts and value is False):
        return ""
    if option.is_flag:
        return f"`{(option.opts if value else option.secondary_opts)[0]}`"
    shown = value.value if isinstance(value, enum.Enum) else value
    return "" if shown == "" else f"`{shown}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield _line(head)
    yield _line(("---",) * len(head))
    yield from (_line(row) for row in rows)
    yield ""


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _text(text: str) -> str:
    """Text as Markdown that shows every sign of it."""
    for sign in ("\\", "|", "*", "_", "<", "[", "`"):
        text = text.replace(sign, f"\\{sign}")
    return text


def main() -> int:
    """Write the page, or with ``--check`` say whether it is current."""
    wanted = reference()
    current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if sys.argv[1:] == ["--check"]:
        if current != wanted:
            output.log(f"{PAGE.name} is not what the application says: run `make docs`")
            return 1
        return 0
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
