"""The pages of the documentation, and what stands in them.

Fenced blocks are of these kinds:

- ``console``: commands behind ``$ `` and what they print, abridged by lines of ``...``
- ``sh``: commands alone
- ``python``: code; with ``<!-- file: NAME -->`` before it, a file that is run
- anything else is shown only

``<!-- heavy -->`` before a block: too slow to run, its commands are parsed against the options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\s*$")
_NOTE = re.compile(r"^<!--\s*(.*?)\s*-->$")
SPAN = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+\s+(.*)$")
_VARIES = re.compile(r"[\d.,]*\d|[█·]+")
ELLIPSIS = "..."


def pages() -> list[Path]:
    """Every page that a reader of the repository meets."""
    found = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "plans" / "README.md"]
    return [*found, *sorted((ROOT / "docs").glob("*.md"))]


def page_id(page: Path) -> str:
    """A page's path in the repository."""
    return str(page.relative_to(ROOT))


@dataclass
class Command:
    """A command and what is shown of its output (nothing for ``sh``)."""

    text: str
    shown: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``note`` is the comment before it."""

    page: Path
    line: int
    language: str
    lines: tuple[str, ...]
    note: str

    @property
    def heavy(self) -> bool:
        return self.note == "heavy"

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def commands(self) -> list[Command]:
        """The commands of a ``console`` block with their output; a ``sh`` block is one command."""
        if self.language == "sh":
            return [Command(self.text)]
        if self.language != "console":
            return []
        found: list[Command] = []
        for line in self.lines:
            if found and not found[-1].shown and found[-1].text.endswith("\\"):
                found[-1].text += f"\n{line}"
            elif line.startswith("$ "):
                found.append(Command(line.removeprefix("$ ")))
            else:
                assert found, f"{self.place} begins with output"
                found[-1].shown.append(line.rstrip())
        return found


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    note, opened, language = "", 0, ""
    inside: list[str] | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = _FENCE.match(line)
        if inside is not None and line.strip() == "```":
            yield Block(page, opened, language, tuple(inside), note)
            inside, note = None, ""
        elif inside is not None:
            inside.append(line)
        elif fence:
            inside, opened, language = [], number, fence[1]
        elif line.strip():
            comment = _NOTE.match(line)
            note = comment[1] if comment else ""
    assert inside is None, f"{page}:{opened} is not closed"


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    kept, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    for line in prose(page).splitlines():
        if heading := _HEADING.match(line):
            text = "".join(c for c in heading[1].lower() if c.isalnum() or c in " -_")
            found.add(text.replace(" ", "-"))
    return found


def shown_in(shown: list[str], printed: list[str]) -> bool:
    """Whether an abridged output is the printed one: ``...`` stands for any number of lines."""
    shown, printed = _without_end(shown), _without_end(printed)
    parts: list[list[str]] = [[]]
    for line in shown:
        if line == ELLIPSIS:
            parts.append([])
        else:
            parts[-1].append(line)
    first, *rest = parts
    if printed[: len(first)] != first:
        return False
    if not rest:
        return len(printed) == len(first)
    *middle, last = rest
    position, end = len(first), len(printed) - len(last)
    for part in middle:
        found = next(
            (at for at in range(position, end) if printed[at : at + len(part)] == part), None
        )
        if found is None:
            return False
        position = found + len(part)
    return position <= end and printed[end:] == last


def refreshed(shown: list[str], printed: list[str]) -> list[str] | None:
    """The abridged output with its numbers as they are printed now; None: more has changed."""
    fresh: list[str] = []
    position = 0
    for line in shown:
        if line in ("", ELLIPSIS):
            fresh.append(line)
            continue
        mask = _masked(line)
        found = next(
            (i for i in range(position, len(printed)) if _masked(printed[i]) == mask), None
        )
        if found is None:
            return None
        fresh.append(printed[found].rstrip())
        position = found + 1
    return fresh if shown_in(fresh, printed) else None


def _masked(line: str) -> str:
    """A line without what a new measurement changes: numbers, bars, widths of columns."""
    return " ".join(_VARIES.sub("#", line).split())


def rewrite(block: Block, outputs: list[list[str]]) -> None:
    """Put other outputs behind the commands of a ``console`` block of as many lines."""
    lines = block.page.read_text(encoding="utf-8").splitlines()
    fresh = []
    for command, output in zip(block.commands(), outputs, strict=True):
        fresh += [*f"$ {command.text}".splitlines(), *output]
    lines[block.line : block.line + len(block.lines)] = fresh
    block.page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _without_end(lines: list[str]) -> list[str]:
    """Lines without trailing blanks and without empty lines at the end."""
    kept = [line.rstrip() for line in lines]
    while kept and not kept[-1]:
        kept.pop()
    return kept
