from __future__ import annotations

import os
from pathlib import Path

import pytest

from mfsdp_cli.compare.lines import MAX_LINE, Line, lines, require_file
from mfsdp_cli.errors import MfsdpError


def read(tmp_path: Path, content: bytes) -> list[Line]:
    path = tmp_path / "file"
    path.write_bytes(content)
    return list(lines(path))


def test_lines_know_whether_they_ended(tmp_path: Path) -> None:
    assert read(tmp_path, b"a\r\nb") == [Line("a"), Line("b", ended=False)]
    assert read(tmp_path, b"") == []


def test_bytes_that_are_no_text_do_not_stop_the_reading(tmp_path: Path) -> None:
    first, second = read(tmp_path, b"caf\xe9 \xff\x00 loss: 5\nnext\n")
    assert first.text.endswith("loss: 5")
    assert second == Line("next")


def test_byte_order_marks(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbfa\n") == [Line("a")]
    assert read(tmp_path, "a\nb\n".encode("utf-16")) == [Line("a"), Line("b")]
    assert read(tmp_path, b"\xfe\xff" + "a\nb".encode("utf-16-be")) == [
        Line("a"),
        Line("b", ended=False),
    ]


def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_whole(tmp_path: Path) -> None:
    long, following = read(tmp_path, b"x" * (3 * MAX_LINE) + b"\nnext\n")
    assert (len(long.text), long.too_long, long.ended) == (MAX_LINE, True, True)
    assert following == Line("next")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MfsdpError, match="MF601"):
        require_file(tmp_path / "none")


@pytest.mark.parametrize("name", ["nul\0byte", "x" * 5000])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(MfsdpError, match="MF602"):
        require_file(tmp_path / name)


def test_a_link_to_itself_and_a_pipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for name in ("loop", "pipe"):
        with pytest.raises(MfsdpError, match="MF602"):
            require_file(tmp_path / name)


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(MfsdpError, match="MF602"):
        list(lines(tmp_path))
