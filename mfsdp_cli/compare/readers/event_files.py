"""TensorBoard event files: every scalar of every file, no sampling.

The framing (length, checksum, data, checksum) is read here; TensorBoard's own loader stops
without a word at damage, and its accumulator keeps 10,000 points of a tag. The protocol buffers
come from the ``tensorboard`` package; neither tensorflow nor torch is imported.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mfsdp_cli.compare.collector import Collector
from mfsdp_cli.compare.lines import head, require_file, unreadable
from mfsdp_cli.compare.names import BATCH_SIZES, normal
from mfsdp_cli.compare.run import Run
from mfsdp_cli.compare.values import step_number
from mfsdp_cli.errors import MfsdpError

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

NAME = "tensorboard"
LOOKED_FOR = "TensorBoard events (events.out.tfevents.*)"

#: A record that claims to be longer is damage; one that is longer than the second is no scalar.
_MAX_RECORD, _MAX_CHECKED = 2**28, 2**16
#: Folders below the given one are searched this deep.
_MAX_DEPTH = 4
_VS_SAMPLES = " vs samples"

#: Tensor types that a scalar may have: where the value is, and its packed form.
_TENSORS = {1: ("float_val", "<f"), 2: ("double_val", "<d"), 3: ("int_val", "<i")}


def is_event_file(path: Path) -> bool:
    """Whether the file begins with a record's length and the right checksum of it."""
    start = head(path, 12)
    return len(start) == 12 and _checksum(start[:8]) == struct.unpack("<I", start[8:])[0]


def find(folder: Path) -> list[Path]:
    """Event files in the folder, or below it if they all lie in one place.

    Raises:
        MfsdpError: MF605 if several folders below hold event files.
    """
    places: dict[Path, list[Path]] = {}
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(folders) if depth < _MAX_DEPTH else []
        events = _event_files(Path(place), names)
        if events and depth == 0:
            return events
        if events:
            places[Path(place)] = events
    if len(places) > 1:
        raise MfsdpError(
            "MF605",
            f"{len(places)} folders below hold event files: " + ", ".join(map(str, places)),
            where=str(folder),
            hint="give one of them",
        )
    return next(iter(places.values()), [])


def _event_files(place: Path, names: list[str]) -> list[Path]:
    """Files named as event files, if one of them is one: damaged ones are not passed over."""
    found = [place / name for name in sorted(names) if ".tfevents." in name]
    found = [path for path in found if path.is_file() and path.stat().st_size]
    return found if any(map(is_event_file, found)) else []


def read(paths: list[Path], collector: Collector) -> Run:
    """The run that event files hold together, in the order in which they were begun."""
    reader = _Reader(collector)
    for path in sorted(paths, key=lambda path: (_begun(path), path.name)):
        require_file(path)
        reader.read(path)
    return collector.finish(NAME)


def _begun(path: Path) -> float:
    """Wall time of the first event, seconds; every writer opens its file with one."""
    first = next(_records(path, []), None)
    event = None if first is None else _parse(first)
    return 0.0 if event is None else event.wall_time


class _Reader:
    """Feeds the scalars of event files to a collector."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._steps: dict[str, int] = {}  # step of the last point of each tag

    def read(self, path: Path) -> None:
        run, damaged = self._collector.run, 0
        for record in _records(path, run.notes):
            event = None if record is None else _parse(record)
            if event is None:
                damaged += 1
                continue
            for value in event.summary.value:
                self._value(value, event.step)
        if damaged:
            run.damaged += damaged
            run.notes.append(f"{path.name}: {damaged} damaged records, which count as missing")

    def _value(self, value: Summary.Value, step: int) -> None:
        scalar = _scalar(value)
        if scalar is None or step_number(step) is None:
            return
        tag, collector = value.tag, self._collector
        if tag.endswith(_VS_SAMPLES):
            self._place(tag.removesuffix(_VS_SAMPLES), samples=step)
        self._steps[tag] = step
        if normal(tag) in BATCH_SIZES:
            collector.place(step, tag, scalar)
        collector.add(tag, step, scalar)

    def _place(self, tag: str, samples: int) -> None:
        """Megatron writes each value twice: by iteration, then by consumed samples."""
        if tag in self._steps and samples > 0:
            self._collector.place(self._steps[tag], "consumed samples", samples)


def _records(path: Path, notes: list[str]) -> Iterator[bytes | None]:
    """The records of a file, None for one that is damaged.

    After a damaged length the next record cannot be found. A last record that is cut off is left
    out: a run that was killed, or still runs, has one.
    """
    try:
        with path.open("rb") as file:
            while start := file.read(12):
                length, check = struct.unpack("<QI", start) if len(start) == 12 else (0, -1)
                if len(start) == 12 and (_checksum(start[:8]) != check or length > _MAX_RECORD):
                    yield None
                    return
                body = file.read(length + 4)
                if len(start) < 12 or len(body) < length + 4:
                    notes.append(f"{path.name}: the last record is cut off and was left out")
                    return
                yield _checked(body)
    except OSError as error:
        raise unreadable(path, error) from None


def _checked(body: bytes) -> bytes | None:
    """The record without its checksum; None if that is wrong."""
    data, check = body[:-4], struct.unpack("<I", body[-4:])[0]
    return data if len(data) > _MAX_CHECKED or _checksum(data) == check else None


def _checksum(data: bytes) -> int:
    """The masked CRC-32C of TFRecord files."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _crc_table() -> tuple[int, ...]:
    """One byte's remainders by the reversed Castagnoli polynomial."""
    table = []
    for remainder in range(256):
        for _ in range(8):
            remainder = (remainder >> 1) ^ (0x82F63B78 if remainder & 1 else 0)
        table.append(remainder)
    return tuple(table)


def _parse(record: bytes) -> Event | None:
    """The event of a record; None if it is none."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        return Event.FromString(record)
    except DecodeError:
        return None


def _scalar(value: Summary.Value) -> float | None:
    """The number of a summary value; None for images, histograms, text and the like."""
    if value.HasField("simple_value"):
        return value.simple_value
    if not value.HasField("tensor") or value.tensor.dtype not in _TENSORS:
        return None
    tensor = value.tensor
    if any(dimension.size != 1 for dimension in tensor.tensor_shape.dim):
        return None
    name, packed = _TENSORS[tensor.dtype]
    if listed := getattr(tensor, name):
        return float(listed[0])
    content = tensor.tensor_content
    return struct.unpack(packed, content)[0] if len(content) == struct.calcsize(packed) else None
