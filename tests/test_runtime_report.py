from __future__ import annotations

from pathlib import Path

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.runtime.job import REPORTS
from mfsdp_cli.runtime.report import finding_of, read_reports, report_of, write_report


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_the_first_cause_comes_before_lost_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPORTS, str(tmp_path))
    write_report(0, RuntimeError("[gloo/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]"))
    write_report(3, RuntimeError("[gloo/tcp/pair.cc:1] Connection reset by peer"))
    write_report(2, _raised(ValueError("the real one")))
    write_report(1, _raised(ValueError("a later one")))
    reports = read_reports(tmp_path)
    assert [report.rank for report in reports] == [2, 1, 0, 3]
    finding = finding_of(reports[0], others=3)
    assert finding.code == "MF512"
    assert finding.message == "rank 2: ValueError: the real one (3 other rank(s) ended with it)"
    assert "_raised" in reports[0].traceback


def test_an_error_of_ours_keeps_its_code_hint_and_exit_code() -> None:
    error = MfsdpError("MF506", "token 300", hint="use another", where="--data x", exit_code=2)
    report = report_of(1, error)
    finding = finding_of(report, others=1)
    assert (finding.code, finding.message, finding.hint) == ("MF506", "token 300", "use another")
    assert finding.where == "rank 1, --data x"
    assert report.exit_code == 2


def test_without_a_launcher_there_is_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(REPORTS, raising=False)
    monkeypatch.chdir(tmp_path)
    write_report(0, ValueError("nobody listens"))
    assert list(tmp_path.iterdir()) == []
