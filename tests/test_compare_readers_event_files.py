from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from mfsdp_cli.compare.readers import read_run
from mfsdp_cli.errors import MfsdpError
from tests.helpers.runs import DATA


def record(event: Event) -> bytes:
    """A TFRecord, framed with TensorBoard's own checksum as an independent witness."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return (
        length
        + struct.pack("<I", masked_crc32c(length))
        + data
        + struct.pack("<I", masked_crc32c(data))
    )


def scalar(step: int, value: float, tag: str = "lm loss") -> bytes:
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
    return record(Event(step=step, wall_time=step, summary=summary))


def tensor(step: int, proto: TensorProto, tag: str = "lm loss") -> bytes:
    return record(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, tensor=proto)])))


def header(wall_time: float) -> bytes:
    return record(Event(wall_time=wall_time, file_version="brain.Event:2"))


def write(folder: Path, *records: bytes, name: str = "events.out.tfevents.1.host") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(b"".join(records))
    return path


def test_old_and_new_scalars_and_nothing_else(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        header(1),
        scalar(1, 5.0),
        tensor(2, TensorProto(dtype=1, float_val=[4.5])),
        tensor(3, TensorProto(dtype=2, double_val=[4.0])),
        tensor(4, TensorProto(dtype=1, tensor_content=struct.pack("<f", 3.5))),
        tensor(5, TensorProto(dtype=7, string_val=[b"text"])),
        tensor(6, TensorProto(dtype=1, float_val=[1.0, 2.0], tensor_shape={"dim": [{"size": 2}]})),
        scalar(-1, 9.0),
    )
    run = read_run(str(path))
    assert list(run.train.finite()) == [(1, 5.0), (2, 4.5), (3, 4.0), (4, 3.5)]
    assert run.damaged == 0


def test_nan_and_infinity(tmp_path: Path) -> None:
    path = write(tmp_path, scalar(1, float("nan")), scalar(2, float("-inf")), scalar(3, 5.0))
    run = read_run(str(path))
    assert (run.train.nan(), run.train.infinite()) == ([1], [2])


def test_files_are_read_in_the_order_in_which_they_were_begun(tmp_path: Path) -> None:
    write(tmp_path, header(200), scalar(2, 4.5), scalar(3, 3.0), name="events.out.tfevents.a")
    write(tmp_path, header(100), scalar(1, 5.0), scalar(2, 4.0), name="events.out.tfevents.b")
    run = read_run(str(tmp_path))
    assert list(run.train.finite()) == [(1, 5.0), (2, 4.5), (3, 3.0)]
    assert run.repeated_steps == 1


def test_a_cut_last_record_is_left_out_wherever_it_ends(tmp_path: Path) -> None:
    first, second = header(1) + scalar(1, 5.0), scalar(2, 4.0)
    for end in range(1, len(second)):
        run = read_run(str(write(tmp_path, first, second[:end])))
        assert list(run.train.finite()) == [(1, 5.0)]
        assert run.notes == [
            "events.out.tfevents.1.host: the last record is cut off and was left out"
        ]
        assert run.damaged == 0


def test_damage_inside_is_counted_and_reading_goes_on(tmp_path: Path) -> None:
    damaged = bytearray(scalar(2, 4.0))
    damaged[-6] ^= 1
    path = write(tmp_path, header(1), scalar(1, 5.0), bytes(damaged), scalar(3, 3.0))
    run = read_run(str(path))
    assert list(run.train.finite()) == [(1, 5.0), (3, 3.0)]
    assert (run.damaged, run.missing) == (1, 1)


def test_a_damaged_length_ends_the_file_and_is_counted(tmp_path: Path) -> None:
    damaged = bytearray(scalar(2, 4.0))
    damaged[1] ^= 1
    run = read_run(str(write(tmp_path, header(1), scalar(1, 5.0), bytes(damaged), scalar(3, 3.0))))
    assert (list(run.train.finite()), run.damaged) == ([(1, 5.0)], 1)


def test_a_damaged_file_beside_a_good_one_is_not_passed_over(tmp_path: Path) -> None:
    write(tmp_path, header(1), scalar(1, 5.0))
    write(tmp_path, b"rubbish that is long enough", name="events.out.tfevents.2.host")
    write(tmp_path, name="events.out.tfevents.3.host")  # an empty file is no damage
    assert read_run(str(tmp_path)).damaged == 1


def test_a_record_that_is_no_event(tmp_path: Path) -> None:
    data = b"\xff" * 20
    length = struct.pack("<Q", len(data))
    bad = length + struct.pack("<I", masked_crc32c(length)) + data
    path = write(tmp_path, scalar(1, 5.0), bad + struct.pack("<I", masked_crc32c(data)))
    assert read_run(str(path)).damaged == 1


def test_samples_from_megatrons_second_tags(tmp_path: Path) -> None:
    shutil.copytree(DATA / "c07_tb_tags", tmp_path / "tb")
    run = read_run(str(tmp_path / "tb"))
    assert run.batch_sizes == (64,)
    assert [run.samples.at(step) for step in (1, 5, 10)] == [64, 320, 640]


def test_an_unknown_tag_is_answered_with_the_tags() -> None:
    with pytest.raises(MfsdpError, match="MF603") as caught:
        read_run(str(DATA / "c07_tb_tags"), "val_perplexity")
    for tag in ("'lm loss'", "'grad-norm'", "'lm loss validation'", "'lm loss vs samples'"):
        assert tag in caught.value.finding.message


def test_a_tag_that_is_asked_for() -> None:
    run = read_run(str(DATA / "c07_tb_tags"), "grad norm")
    assert (run.train_name, run.train.points) == ("grad-norm", 10)
    run = read_run(str(DATA / "c07_tb_tags"), "lm loss vs samples")
    assert list(run.train.steps) == [64 * step for step in range(1, 11)]


def test_a_folder_of_one_run_is_searched_and_of_several_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "one", header(1), scalar(1, 5.0))
    assert read_run(str(tmp_path)).train.points == 1
    write(tmp_path / "logs" / "two", header(1), scalar(1, 5.0))
    with pytest.raises(MfsdpError, match=r"MF605.*logs/one.*logs/two"):
        read_run(str(tmp_path))


def test_reading_imports_neither_torch_nor_tensorflow_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from mfsdp_cli.compare.readers import read_run\n"
        f"read_run({str(DATA / 'c07_tb_tags')!r})\n"
        "print([m for m in ('torch', 'tensorflow', 'numpy', 'matplotlib') if m in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
