"""docs/errors.md against the source: every code, its severity, the names of rules and checks."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from mfsdp_cli.rules.judge import RULES
from mfsdp_cli.runtime import traced
from mfsdp_cli.schedule.proof import check
from tests.helpers.markdown import ROOT

_ROW = re.compile(r"^\| (MF\d{3}) \| (error|warning|note) \| (.+) \|$", re.MULTILINE)
_CODE = re.compile(r"MF\d{3}")
_HEADINGS = re.compile(r"^## (MF\d)xx", re.MULTILINE)


def page() -> str:
    return (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


def documented() -> dict[str, tuple[str, str]]:
    """Code -> (severity, meaning)."""
    return {code: (severity, meaning) for code, severity, meaning in _ROW.findall(page())}


def sources() -> Iterator[ast.Module]:
    for path in sorted((ROOT / "mfsdp_cli").rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def in_source() -> set[str]:
    """Every string in the package that is a code."""
    return {
        node.value
        for tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _CODE.fullmatch(node.value)
    }


def severities() -> dict[str, set[str]]:
    """Severities that the source gives a code, where a call says it in so many words."""
    found: dict[str, set[str]] = defaultdict(set)
    for tree in sources():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            code = node.args[0]
            if not (isinstance(code, ast.Constant) and _CODE.fullmatch(str(code.value))):
                continue
            called = ast.unparse(node.func).split(".")[-1]
            if called == "MfsdpError":
                found[code.value].add("error")
            elif called in ("warn", "_warning"):
                found[code.value].add("warning")
            elif called == "Finding":
                found[code.value].add(ast.unparse(node.args[1]).split(".")[-1].lower())
    for rule in RULES:
        found[rule.code].add(str(rule.severity))
    return found


def test_every_code_once_and_none_left_over() -> None:
    codes = [code for code, _, _ in _ROW.findall(page())]
    assert codes == sorted(set(codes))
    assert in_source() - set(codes) == set()
    assert set(codes) - in_source() == set()


def test_codes_stand_under_their_heading() -> None:
    for section in re.split(r"^(?=## MF)", page(), flags=re.MULTILINE)[1:]:
        heading = _HEADINGS.match(section)
        assert heading is not None
        for code, _, _ in _ROW.findall(section):
            assert code.startswith(heading[1])


def test_severities_are_those_of_the_source() -> None:
    found = severities()
    assert len(found) > 80
    for code, (severity, _) in documented().items():
        if code in found:
            assert severity in found[code], f"{code} is {found[code]}, the page says {severity}"


def test_checks_have_their_own_names() -> None:
    names = {**check.NAMES, **dict([traced.ACTIONS, traced.GATHERS, traced.REDUCTIONS])}
    for code, name in names.items():
        assert documented()[code][1] == name
