"""Readers of runs; the content decides which one reads a path.

To add a format of text lines, write a :class:`~mfsdp_cli.compare.readers.reader.LineReader` and
put it into :data:`LINE_READERS`.
"""

from __future__ import annotations

from pathlib import Path

from mfsdp_cli.compare.collector import Collector
from mfsdp_cli.compare.lines import lines, require_file
from mfsdp_cli.compare.readers import event_files, run_folder
from mfsdp_cli.compare.readers.jsonl import Jsonl
from mfsdp_cli.compare.readers.megatron_log import MegatronLog
from mfsdp_cli.compare.readers.reader import LineReader
from mfsdp_cli.compare.readers.torchtitan_log import TorchtitanLog
from mfsdp_cli.compare.run import Run
from mfsdp_cli.errors import MfsdpError

LINE_READERS: tuple[type[LineReader], ...] = (MegatronLog, TorchtitanLog, Jsonl)

#: Lines looked at beyond the first record, so that a stray line of another format decides nothing.
_MORE_LINES = 500


def read_run(path: str, metric: str | None = None) -> Run:
    """Read a run of any known format.

    Args:
        path: a run folder, a folder of event files, an event file or a text file.
        metric: the metric to take in place of the training and the evaluation loss.

    Raises:
        MfsdpError: MF601 if there is no run, MF602 if something cannot be read, MF603 and MF604
            for metrics (see :meth:`Collector.finish`), MF605 if a folder holds several runs.
    """
    place = Path(path)
    require_file(place)
    collector = Collector(path, metric)
    if place.is_dir():
        return _read_folder(place, collector)
    if event_files.is_event_file(place):
        return event_files.read([place], collector)
    return _read_lines(place, collector)


def _read_folder(folder: Path, collector: Collector) -> Run:
    metrics = folder / run_folder.METRICS
    if metrics.exists():
        require_file(metrics)
        reader = Jsonl(collector)
        _feed(reader, metrics)
        run_folder.add_settings(folder, collector)
        return collector.finish(run_folder.NAME, may_be_empty=True)
    if found := event_files.find(folder):
        run_folder.add_settings(folder, collector)
        return event_files.read(found, collector)
    if (folder / run_folder.RUN).is_file():
        run_folder.add_settings(folder, collector)
        return collector.finish(run_folder.NAME, may_be_empty=True)
    raise _not_a_run(folder, [run_folder.LOOKED_FOR, event_files.LOOKED_FOR])


def _read_lines(path: Path, collector: Collector) -> Run:
    reader = _detect(path)(collector)
    _feed(reader, path)
    return collector.finish(reader.format, may_be_empty=reader.may_be_empty)


def _feed(reader: LineReader, path: Path) -> None:
    for line in lines(path):
        reader.read(line)
    reader.end()


def _detect(path: Path) -> type[LineReader]:
    """The reader that claims the most lines, looking a while beyond the first claim."""
    claims = dict.fromkeys(LINE_READERS, 0)
    left: int | None = None
    for line in lines(path):
        if left == 0:
            break
        for reader in LINE_READERS:
            claims[reader] += not line.too_long and reader.claims(line.text)
        if left is not None or any(claims.values()):
            left = (_MORE_LINES if left is None else left) - 1
    if not any(claims.values()):
        raise _not_a_run(path, [event_files.LOOKED_FOR, *(r.looked_for for r in LINE_READERS)])
    return max(LINE_READERS, key=claims.__getitem__)


def _not_a_run(path: Path, looked_for: list[str]) -> MfsdpError:
    what = "folder" if path.is_dir() else "file"
    empty = what == "file" and path.stat().st_size == 0
    return MfsdpError(
        "MF601",
        f"{'an empty file is' if empty else f'this {what} is'} no run that can be compared;"
        f" looked for {'; '.join(looked_for)}",
        where=str(path),
        hint="give a run folder, its metrics, TensorBoard events or the log of the training",
    )
