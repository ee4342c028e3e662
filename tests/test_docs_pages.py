"""Links, file names, tree and generated reference are current; nothing is of one machine."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.markdown import ROOT, SPAN, anchors, blocks, page_id, pages, prose

_LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_links_resolve(page: Path) -> None:
    for target in _LINK.findall(prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page_id(page)}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page_id(page)}: {target}"


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_files_in_the_text_exist(page: Path) -> None:
    for span in SPAN.findall(prose(page)):
        if re.fullmatch(r"(?:[a-z_]+/)+(?:[\w.-]+\.(?:py|md|sh|json))?", span):
            if span.startswith(("runs/", "trace/")):
                continue
            places = (ROOT / span, ROOT / "mfsdp_cli" / span, page.parent / span)
            assert any(place.exists() for place in places), f"{page_id(page)}: {span}"


def test_every_page_is_linked() -> None:
    readme = ROOT / "README.md"
    linked = {(readme.parent / t.partition("#")[0]).resolve() for t in _LINK.findall(prose(readme))}
    assert [page_id(p) for p in pages() if p != readme and p.resolve() not in linked] == []


def test_the_tree_in_the_readme_is_the_real_one() -> None:
    tree = next(b for b in blocks(ROOT / "README.md") if "mfsdp_cli/  " in b.text)
    shown, folders = set(), [""]
    for line in tree.lines:
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth + 1 :] = [folders[depth] + name]
        shown.add(folders[depth] + name)
    for name in shown:
        assert (ROOT / name).exists(), name
        assert (ROOT / name).is_dir() == name.endswith("/"), name
    assert {name for name in real_folders() if name not in shown} == set()


def real_folders() -> set[str]:
    """Folders that a clone has: the top ones, those of the tests, and all of the package."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    folders = {
        f"{parent}/" for file in files for parent in Path(file).parents if str(parent) != "."
    }
    return {
        folder
        for folder in folders
        if not folder.startswith(".")
        and (
            folder.count("/") == 1
            or (folder.startswith("tests/") and folder.count("/") == 2)
            or folder.startswith("mfsdp_cli/")
        )
    }


def test_the_command_line_reference_is_current() -> None:
    script = ROOT / "scripts" / "make_cli_reference.py"
    spec = importlib.util.spec_from_file_location("make_cli_reference", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == module.reference(), "run `make docs`"


def test_no_file_speaks_of_one_machine() -> None:
    """No path of the machine that it was written on, no address that a user need not know."""
    own = rf"{re.escape(str(ROOT))}\b|" if len(ROOT.parts) > 2 else ""
    paths = re.compile(rf"{own}(?<![\w.}}])/(?:home|root|work|Users)/\w+")
    hosts = ("www.apache.org", "www.w3.org", "arxiv.org")
    for name in tracked():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        assert not paths.findall(text), f"{name} names {paths.findall(text)}"
        if not name.startswith("tests/data/"):
            for host in re.findall(r"https?://([\w.-]+)", text):
                assert host in hosts, f"{name} names {host}"


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return listed.stdout.splitlines()
