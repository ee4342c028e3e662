"""Schedules in the CSV of ``torch.distributed.pipelining``: a row a rank, a cell an action.

Read are compute-only files and files with communication, split backwards, and overlapped pairs
such as ``(0F1;1B0)OVERLAP_F_B``, whose parts torch runs one after another. Blanks around an action
and blank cells mean nothing. Which stages a rank holds, and how many microbatches there are,
follows from the forwards and backwards in the file.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.schedule.actions import COMPUTE, END_OF_STEP, Action, Kind, parse_action
from mfsdp_cli.schedule.graph import Graph
from mfsdp_cli.schedule.grid import grid
from mfsdp_cli.schedule.proof import check_order
from mfsdp_cli.schedule.proof.check import FAIL, Check, Subject, skipped
from mfsdp_cli.schedule.proof.end_of_step import check_end_of_step
from mfsdp_cli.schedule.proof.gradients import check_reductions
from mfsdp_cli.schedule.proof.memory import check_gathered

MAX_BYTES = 256 * 1024 * 1024
_OVERLAP = re.compile(r"\(([^()]*)\)\s*OVERLAP_F_B")


@dataclass(frozen=True)
class CsvSchedule:
    """A schedule read from a file.

    Args:
        lists: actions of each rank.
        stage_ranks: rank of each stage that computes; the first where there are two.
    """

    lists: list[list[Action]]
    stage_ranks: dict[int, int]
    num_stages: int
    num_microbatches: int

    @property
    def has_messages(self) -> bool:
        """Whether sends or receives stand in the file."""
        return self.subject().graph.has_messages

    def subject(self) -> Subject:
        """What the checks judge."""
        return Subject(Graph(self.lists, self.stage_ranks), self.num_stages, self.num_microbatches)


def check_csv(text: str, *, p2p: str = "rendezvous") -> list[Check]:
    """Judge the orders in a CSV text.

    With communication actions each row is one thread in order and a receive waits for its send.
    In a compute-only file compute actions wait for one another directly, and ``p2p`` does not
    apply.

    Args:
        p2p: ``rendezvous``: a send waits until its receive is reached; ``buffered``: it goes on.

    Raises:
        MfsdpError: MF307 a cell that is no action, MF308 a file without forward or backward,
            MF305 an unknown ``p2p``.
    """
    subject = read_csv(text).subject()
    checks = check_order(subject, p2p=p2p)
    present = set(subject.graph.kinds)
    if Kind.UNSHARD in present or Kind.RESHARD in present:
        checks.append(check_gathered(subject))
    if Kind.REDUCE_GRAD in present:
        checks.append(_reductions(subject, checks[0]))
    if present & END_OF_STEP:
        checks.append(check_end_of_step(subject))
    return checks


def _reductions(subject: Subject, complete: Check) -> Check:
    if complete.status == FAIL:
        return skipped("MF317", "forwards and backwards are not complete (MF311)")
    return check_reductions(subject, None)


def read_csv_text(path: str | Path) -> str:
    """The text of a CSV file. Raises MF308 where it is no readable text file."""
    place = Path(path)
    try:
        if place.stat().st_size > MAX_BYTES:
            raise MfsdpError(
                "MF308",
                f"the file has {place.stat().st_size} bytes; a schedule has at most {MAX_BYTES}",
                where=str(path),
            )
        return place.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise MfsdpError("MF308", f"cannot read the schedule: {reason}", where=str(path)) from error
    except ValueError as error:
        raise MfsdpError(
            "MF308",
            "the schedule is not a text file in UTF-8",
            where=str(path),
            hint="export it as CSV: a row a rank, a cell an action",
        ) from error


def read_csv(text: str) -> CsvSchedule:
    """Parse a CSV text. Raises MF307 and MF308 as :func:`check_csv` does."""
    rows = _rows(text.removeprefix("\ufeff"))
    lists = [
        [action for column in range(len(row)) for action in _actions(rows, rank, column)]
        for rank, row in enumerate(rows)
    ]
    stage_ranks: dict[int, int] = {}
    microbatches = 0
    for rank, actions in enumerate(lists):
        for action in actions:
            if action.kind in COMPUTE and action.stage is not None:
                stage_ranks.setdefault(action.stage, rank)
                microbatches = max(microbatches, (action.microbatch or 0) + 1)
    if not stage_ranks:
        raise MfsdpError(
            "MF308",
            "the schedule holds no forward and no backward",
            hint="a row a rank, cells such as 0F0 and 0B0",
        )
    return CsvSchedule(lists, stage_ranks, max(stage_ranks) + 1, microbatches)


def _rows(text: str) -> list[list[str]]:
    """Cells by row; rows of blank cells at the end of the file are no ranks."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    try:
        rows = list(csv.reader(lines))
    except csv.Error as error:
        raise MfsdpError("MF307", f"the schedule does not parse as CSV: {error}") from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return rows


def _actions(rows: list[list[str]], row: int, column: int) -> list[Action]:
    """The actions of a cell: none where it is blank, two where they overlap."""
    cell = rows[row][column].strip()
    if not cell:
        return []
    overlap = _OVERLAP.fullmatch(cell)
    texts = overlap[1].split(";") if overlap else [cell]
    try:
        return [parse_action(text) for text in texts]
    except MfsdpError as error:
        raise MfsdpError(
            "MF307",
            f"row {row + 1}, column {column + 1}: {error.finding.message}",
            where=f"rank {row}, cell {column + 1}\n{grid(rows, [(row, column)])}",
            hint=error.finding.hint,
        ) from error
