"""Who may import whom, what stays unloaded while planning, and who prints."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mfsdp_cli"
HEAVY = ("torch", "megatron", "numpy", "networkx", "tensorboard", "matplotlib")
#: Rooms and modules that know no torch, nor anything that is built on it.
NO_TORCH = ("model", "layout", "schedule", "cost", "rules", "compare", "planning")
NO_TORCH_MODULES = ("plan", "parallel", "errors", "output", "cli")
#: What each room may use of the package, beside itself and the shared modules.
ALLOWED = {
    "model": {"layout"},
    "layout": {"model"},
    "schedule": {"layout", "model"},
    "cost": {"model", "layout", "schedule"},
    "rules": {"model", "layout", "schedule"},
    "planning": {"model", "layout", "schedule", "cost", "rules"},
    "compare": set(),
    "fsdp": set(),
    "baselines": {"model", "layout", "schedule", "runtime"},
}
SHARED = {"errors", "files", "parallel", "plan", "output", ""}


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def _room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def _imports(path: Path) -> Iterator[str]:
    """Full names of everything a module imports anywhere, imports for types alone left out."""
    tree = ast.parse(path.read_text())
    for node in _running(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            yield node.module
            if node.module == "mfsdp_cli":
                yield from (f"mfsdp_cli.{alias.name}" for alias in node.names)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes except the bodies of ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _running(child)


@pytest.mark.parametrize("path", _modules(), ids=_name)
def test_imports_of_a_module(path: Path) -> None:
    name = _name(path)
    room = _room(name)
    imported = set(_imports(path))
    outside = {item.split(".")[0] for item in imported}
    rooms = {_room(item) for item in imported if item.split(".")[0] == "mfsdp_cli"}
    if room in NO_TORCH or room in NO_TORCH_MODULES:
        assert not outside & {"torch", "megatron"}
    if room == "fsdp":
        standard = set(sys.stdlib_module_names)
        assert outside <= standard | {"torch", "mfsdp_cli"}
    if room not in ("commands", "cli"):
        assert "commands" not in rooms
    if room in ALLOWED:
        assert rooms <= ALLOWED[room] | SHARED | {room}
    if name == "mfsdp_cli.baselines.single":
        assert not any(item.startswith("mfsdp_cli.fsdp") for item in imported)


def test_the_rooms_of_the_table_exist() -> None:
    """A room that is renamed must not slip out of the test above."""
    rooms = {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert rooms == set(ALLOWED) | {"commands", "runtime"}


@pytest.mark.parametrize("path", _modules(), ids=_name)
def test_only_output_prints(path: Path) -> None:
    if _name(path) == "mfsdp_cli.output":
        return
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called != "print", f"{path}:{node.lineno} prints"
            assert called not in (
                "sys.stdout.write",
                "sys.stderr.write",
                "typer.echo",
                "typer.secho",
            ), f"{path}:{node.lineno} writes to a stream"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["plan", "--help"], 0),
        (["plan", "deepseek-v3", "--pp", "16", "--layout", "Et*3|(tt|)*29,m|L"], 0),
        (["plan", "llama-tiny", "--pp", "2", "--vpp", "2", "--json", "--out", "{out}"], 0),
        (["plan", "llama3-8b", "--world-size", "16", "--hardware", "h200", "--bf16"], 0),
        (["plan", "llama-tiny", "--tp", "2"], 1),
        (["plan", "llama-tiny", "--pp", "3", "--split", "even"], 2),
        (["validate", "deepseek-v3-proxy-tiny", "--pp", "2", "--vpp", "2", "--json"], 0),
        (["validate", "llama-tiny", "--fp16", "--json"], 1),
        (["validate", "{plan}"], 0),
        (["validate", "--schedule-csv", "{csv}"], 0),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else str(value),
)
def test_planning_and_static_validation_load_nothing_heavy(
    arguments: list[str], code: int, tmp_path: Path
) -> None:
    plan, csv = tmp_path / "plan.json", tmp_path / "schedule.csv"
    if "{plan}" in arguments or "{csv}" in arguments:
        _run(["plan", "llama-tiny", "--pp", "2", "--out", str(plan), "--graph", str(csv)])
    places = {"{out}": str(tmp_path / "out.json"), "{plan}": str(plan), "{csv}": str(csv)}
    found = _run([places.get(word, word) for word in arguments])
    assert found["code"] == code
    assert [name for name in HEAVY if name in found["loaded"]] == []


def _run(arguments: list[str]) -> dict:
    """Run a command in a fresh interpreter; its exit code and the top modules it loaded."""
    script = (
        "import sys, json\n"
        f"sys.argv = ['mfsdp', *{arguments!r}]\n"
        "from mfsdp_cli.cli import main\n"
        "code = 0\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as leave:\n"
        "    code = int(leave.code or 0)\n"
        "names = sorted({name.split('.')[0] for name in sys.modules})\n"
        "sys.stdout.write('\\n' + json.dumps({'code': code, 'loaded': names}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    found: dict = json.loads(done.stdout.splitlines()[-1])
    return found
