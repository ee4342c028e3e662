"""The documentation says what is so: commands run and print what is shown, code runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from mfsdp_cli.cli import app
from tests.helpers.markdown import (
    ROOT,
    SPAN,
    Block,
    blocks,
    page_id,
    pages,
    prose,
    refreshed,
    rewrite,
    shown_in,
)

BIN = Path(sys.executable).parent
WIDTH = 96
_MARK = re.compile(r"\x1e(\d+) (\d+)\n")
_FLAG = re.compile(r"(?<![\w-])--[a-z0-9][a-z0-9-]*")
#: Flags of other programs that the pages name.
OTHER_FLAGS = {"--check", "--nproc-per-node", "--standalone", "--foo", "--num-query-groups"}
OTHER_FLAGS |= {"--group-query-attention", "--help", "--version"}
#: What a heavy block must contain: nothing else needs to be heavy.
HEAVY = re.compile(r"make |torchrun|mfsdp train|--numeric|compare-runs runs/")


def commands_of(name: str) -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands[name]


def options() -> set[str]:
    group: Any = typer.main.get_command(app)
    return {
        name
        for command in group.commands.values()
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


# -- commands --------------------------------------------------------------------------------


RUNNABLE = [
    page
    for page in pages()
    if any(b.language in ("sh", "console") and not b.heavy for b in blocks(page))
]


@pytest.mark.parametrize("page", RUNNABLE, ids=page_id)
def test_commands_print_what_is_shown_golden(page: Path, tmp_path: Path) -> None:
    """All commands of a page in order, in one shell that starts in an empty folder."""
    steps = [(b, c) for b in blocks(page) if not b.heavy for c in b.commands()]
    results = run_in_shell([command.text for _, command in steps], tmp_path)
    if os.environ.get("MFSDP_UPDATE_GOLDEN") == "1":
        update(page, [printed for _, printed in results])
        return
    for index, (block, command) in enumerate(steps):
        status, printed = results[index]
        following = steps[index + 1][1].text if index + 1 < len(steps) else ""
        where = f"{block.place}: {command.text}\nprinted:\n" + "\n".join(printed)
        if following != "echo $?":
            assert status == (1 if fails(command.shown) else 0), f"exit code {status} of {where}"
        if block.language == "console":
            assert shown_in(command.shown, printed), f"not what is shown at {where}"


def update(page: Path, outputs: list[list[str]]) -> None:
    """Bring the numbers that are shown up to date."""
    left = iter(outputs)
    for block in [block for block in blocks(page) if not block.heavy]:
        pairs = [(command, next(left)) for command in block.commands()]
        if block.language == "console":
            fresh = [refreshed(command.shown, printed) for command, printed in pairs]
            for (command, printed), lines in zip(pairs, fresh, strict=True):
                assert lines is not None, f"{block.place}: {command.text}\n" + "\n".join(printed)
            rewrite(block, [lines for lines in fresh if lines is not None])


@pytest.mark.parametrize(
    ("shown", "same"),
    [
        ("a b c d", True),
        ("a b c", False),
        ("b c d", False),
        ("a x c d", False),
        ("a ... d", True),
        ("... d", True),
        ("a ...", True),
        ("... b c ...", True),
        ("... c ... b ...", False),
        ("a b ... b c d", False),
    ],
)
def test_abridged_output_is_compared(shown: str, same: bool) -> None:
    assert shown_in(shown.split(), ["a", "b ", "c", "d", ""]) is same


def test_numbers_that_are_shown_can_be_brought_up_to_date() -> None:
    printed = ["rank  peak GiB", "   0     12.50  ███···", "rest", "done in 7"]
    shown = ["rank  peak GiB", "   0      1.25  ██····", "...", "done in 9"]
    assert refreshed(shown, printed) == [*printed[:2], "...", "done in 7"]
    assert refreshed(["other", "..."], printed) is None


def fails(shown: list[str]) -> bool:
    """Whether the verdict that is shown is one with exit code 1."""
    verdicts = ("not valid:", "different:", "next: mend the errors")
    return any(line.startswith(verdicts) for line in shown)


def run_in_shell(commands: list[str], folder: Path) -> list[tuple[int, list[str]]]:
    """Exit code and output lines of each command; ``$?`` is the previous command's."""
    script = "exec 2>&1\n__status=0\n" + "".join(
        f"(exit $__status)\n{command}\n__status=$?\nprintf '\\036{index} %d\\n' $__status\n"
        for index, command in enumerate(commands)
    )
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": str(WIDTH),
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    pieces = _MARK.split(done.stdout)
    found = [(int(pieces[at + 2]), pieces[at].splitlines()) for at in range(0, len(pieces) - 1, 3)]
    assert len(found) == len(commands), f"the shell stopped at: {pieces[-1]}{done.stderr}"
    return found


def mfsdp_commands() -> Iterator[tuple[Block, list[str]]]:
    """The words of every ``mfsdp`` command in any fenced block that is not run."""
    for page in pages():
        for block in blocks(page):
            run = block.language in ("sh", "console") and not block.heavy
            if run or block.language == "text":
                continue
            for line in block.text.replace("\\\n", " ").splitlines():
                line = line.removeprefix("$ ")
                if line.startswith("mfsdp "):
                    yield block, shlex.split(line, comments=True)[1:]


def test_commands_that_are_not_run_are_understood() -> None:
    found = list(mfsdp_commands())
    assert len(found) > 10
    for block, (name, *words) in found:
        command = commands_of(name)
        try:
            context = command.make_context(name, list(words))
        except Exception as error:
            raise AssertionError(f"{block.place}: mfsdp {name} {words}: {error}") from error
        assert context.params, block.place


def test_what_is_heavy_is_heavy() -> None:
    heavy = [block for page in pages() for block in blocks(page) if block.heavy]
    assert heavy
    for block in heavy:
        assert HEAVY.search(block.text), f"{block.place} could be run"


def test_the_commands_of_the_demo_are_those_that_the_readme_shows(tmp_path: Path) -> None:
    """What scripts/demo.sh says that it runs, with a program in place that does nothing."""
    program = tmp_path / ".venv" / "bin" / "mfsdp"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    script = ROOT / "scripts" / "demo.sh"
    done = subprocess.run(
        ["sh", str(script)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    ran = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("$ ")]
    block = next(b for b in blocks(ROOT / "README.md") if "--numeric" in b.text and b.heavy)
    shown = [command.text.replace("\\\n", " ").split() for command in block.commands()]
    assert shown == ran


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set()
    for page in pages():
        spans = " ".join(SPAN.findall(prose(page)))
        code = " ".join(b.text for b in blocks(page) if b.language == "sh")
        named |= set(re.findall(r"\bmake ([a-z-]+)", f"{spans}\n{code}"))
    assert {"demo", "test"} <= named
    assert named <= targets, named - targets


def test_flags_in_the_text_exist() -> None:
    known = options() | OTHER_FLAGS
    for page in pages():
        for span in SPAN.findall(prose(page)):
            for flag in _FLAG.findall(span):
                assert flag in known or flag.endswith("-"), f"{page_id(page)}: {flag}"


# -- code ------------------------------------------------------------------------------------


def python_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks(page) if block.language == "python"]


def test_python_blocks_compile() -> None:
    assert python_blocks()
    for block in python_blocks():
        compile(block.text, block.place, "exec")


#: What libstdc++ says when a process group's thread outlives the interpreter: seen once in forty
#: runs of two ranks, after the last line was printed. Our own workers leave without destructors.
TEARDOWN = "terminate called without an active exception"


def under_torchrun(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_training_loop_prints_what_is_shown(tmp_path: Path) -> None:
    """The loop of docs/engine.md on one rank and on two."""
    page = ROOT / "docs" / "engine.md"
    code, shown = (
        next(b for b in blocks(page) if b.note == "file: loop.py"),
        next(b for b in blocks(page) if b.language == "console"),
    )
    assert len(code.text.splitlines()) <= 60
    (tmp_path / "loop.py").write_text(code.text)
    outputs = []
    for command in shown.commands():
        words = shlex.split(command.text)
        assert words[0] == "torchrun"
        done = under_torchrun(words[1:], tmp_path)
        if TEARDOWN in done.stderr:
            done = under_torchrun(words[1:], tmp_path)
        assert done.returncode == 0, done.stderr
        printed = done.stdout.splitlines()
        # Another processor may round the fourth digit otherwise; nothing else may differ.
        assert refreshed(command.shown, printed) == printed
        assert numbers(printed) == pytest.approx(numbers(command.shown), rel=1e-3)
        outputs.append(printed)
    one, two = (numbers(printed[:2]) for printed in outputs)
    assert one == pytest.approx(two, rel=1e-3)


def numbers(lines: list[str]) -> list[float]:
    return [float(found) for found in re.findall(r"\d+(?:\.\d+)?", "\n".join(lines))]
