"""``mfsdp train`` as a person runs it: what it leaves, what it refuses, how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import mfsdp
from tests.helpers.plans import plan_of

STEPS = 6


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    plan_of("llama-tiny", pp=2).save(file)
    return file


def _lines(folder: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not strict JSON")

    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def _status(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["status"])


@contextmanager
def _running(plan: Path, folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A run of two ranks that has done a few steps."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mfsdp_cli", "train", str(plan), "--engine", "distopt"),
            *("--steps", "100000", "--run-dir", str(folder), *flags),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (folder / "metrics.jsonl").exists() or len(_steps_so_far(folder)) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no step within two minutes"
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


def _steps_so_far(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


def _workers(folder: Path) -> list[int]:
    """The processes of this run's ranks: what they were told names its folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = entry.read_bytes()
        except OSError:
            continue
        if b"MFSDP_JOB=" in environment and str(folder).encode() in environment:
            found.append(int(entry.parent.name))
    return [pid for pid in found if b"runtime.worker" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _gone(folder: Path, within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while _workers(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_run_leaves_the_contracts_folder(plan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = ("train", plan, "--engine", "single", "--run-dir", folder, "--eval-steps", "1")
    result = mfsdp(*flags, "--steps", STEPS, "--eval-interval", "3", "--lr-warmup-steps", "4")
    assert result.stdout == ""
    assert f"step {STEPS}/{STEPS}" in result.stderr
    assert "tokens/s" in result.stderr
    assert "completed" in result.stderr.splitlines()[-1]
    lines = _lines(folder)
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["lr"] for line in steps] == [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3]
    assert [line["tokens"] for line in steps] == [8 * 32 * step for step in range(1, STEPS + 1)]
    assert set(steps[0]) == {
        *("kind", "step", "loss", "grad_norm", "lr", "tokens", "step_time_s", "peak_bytes")
    }
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [3, 6]
    assert lines[-1] == {"kind": "end", "status": "completed", "step": STEPS}
    run = json.loads((folder / "run.json").read_text())
    document = json.loads(plan.read_text())
    assert run["plan_digest"] == document["plan_digest"]
    assert run["schedule_digest"] == document["schedule"]["digest"]
    assert (run["engine"], run["backend"], run["precision"]) == ("single", "gloo", "fp32")
    assert (run["seed"], run["status"]) == (1234, "completed")
    assert run["settings"]["lr_warmup_steps"] == 4
    assert set(run["versions"]) >= {"python", "torch", "megatron-core", "mfsdp"}
    assert len(run["data_digest"]) == 64
    assert json.loads((folder / "plan.json").read_text()) == document
    _check_tensorboard(folder, steps)

    refused = mfsdp(*flags, code=2)
    assert "error[MF507]: the run folder" in refused.stderr
    assert _lines(folder) == lines
    mfsdp(*flags, "--steps", "1", "--overwrite", "--no-tensorboard")
    assert [line["kind"] for line in _lines(folder)] == ["train", "end"]
    assert not list(folder.glob("events*"))


def _check_tensorboard(folder: Path, steps: list[dict[str, Any]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    tags = {"lm loss", "lm loss validation", "grad-norm", "learning-rate", "tokens-per-second"}
    assert tags <= set(events.Tags()["scalars"])
    assert [(e.step, e.value) for e in events.Scalars("lm loss")] == [
        (line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in steps
    ]


def test_a_loss_that_is_not_finite_ends_the_run_loudly(plan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = mfsdp(
        *("train", plan, "--engine", "single", "--run-dir", folder, "--lr", "1e6"),
        *("--steps", "50", "--lr-warmup-steps", "0"),
        code=1,
    )
    assert "error[MF513]: the loss is not finite at step" in result.stderr
    lines = _lines(folder)
    assert lines[-2]["loss"] is None
    assert lines[-2]["nonfinite"] == "nan"
    assert lines[-1]["status"] == _status(folder) == "nan"
    assert len(lines) < 50


def test_ctrl_c_ends_all_ranks_and_leaves_a_readable_folder(plan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with _running(plan, folder) as process:
        assert len(_workers(folder)) == 2
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert time.monotonic() - began < 10
    assert process.returncode == 130
    assert _gone(folder, within=0)
    assert _lines(folder)[-1] == {"kind": "end", "status": "interrupted"}
    assert _status(folder) == "interrupted"
    assert "interrupted" in said.splitlines()[-1]
    assert "Traceback" not in said


def test_ctrl_c_before_the_ranks_are_there(plan: Path, tmp_path: Path) -> None:
    """As a terminal sends it: to the launcher and to whatever it has started so far."""
    for wait in (0, 1):
        folder = tmp_path / f"run{wait}"
        process = subprocess.Popen(
            [sys.executable, "-m", "mfsdp_cli", "train", str(plan), "--run-dir", str(folder)],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        while not (folder / "run.json").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        time.sleep(wait)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 130
        assert _lines(folder) == [{"kind": "end", "status": "interrupted"}]
        assert _status(folder) == "interrupted"
        assert said == f"{folder}: interrupted\n"
        assert _gone(folder)


def test_a_disk_that_fills_up(plan: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for it: the metrics no longer fit."""
    folder = tmp_path / "run"
    flags = "--engine single --steps 500 --no-tensorboard --no-progress"
    limit = 1 + plan.stat().st_size // 1024
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"ulimit -f {limit};"
            f" '{sys.executable}' -m mfsdp_cli train '{plan}' --run-dir '{folder}' {flags}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "error[MF512]: rank 0: OSError: [Errno 27] File too large" in done.stderr
    assert f"{folder}: failed, step " in done.stderr


def test_a_folder_that_is_taken_away(plan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with _running(plan, folder, "--no-tensorboard") as process:
        shutil.rmtree(folder)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert f"{folder} has no last line: No such file or directory\n{folder}: interrupted\n" in said


def test_a_rank_that_is_killed_ends_the_run_with_its_name(plan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with _running(plan, folder) as process:
        victim = max(_workers(folder))
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        _, said = process.communicate(timeout=20)
        assert time.monotonic() - began < 10
    assert process.returncode == 1
    assert "was killed by SIGKILL" in said
    assert said.index("error[MF512]: rank") == said.index("error[")
    assert _lines(folder)[-1]["status"] == _status(folder) == "failed"
    assert _gone(folder)


def test_no_rank_outlives_its_launcher(plan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with _running(plan, folder) as process:
        process.kill()
        process.wait()
        assert _gone(folder)
    assert _lines(folder)[-1]["status"] == _status(folder) == "failed"


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--resume"], 2, "there is no checkpoint in"),
        (["--engine", "distopt", "--save-interval", "5"], 2, "distopt does not save"),
        (["--wandb"], 2, "--wandb is not supported yet"),
        (["--engine", "fsdp2"], 2, "unknown value 'fsdp2'"),
        (["--precision", "fp8"], 2, "unknown value 'fp8'"),
        (["--backend", "mpi"], 2, "unknown value 'mpi'"),
        (["--lr", "nan"], 2, "nan is not a finite number"),
        (["--lr", "-1"], 2, "-1.0 is not a finite number 0 or more"),
        (["--adam-beta2", "1"], 2, "1.0 is not a finite number in [0, 1)"),
        (["--adam-eps", "0"], 2, "0.0 is not a finite number above 0"),
        (["--seed", str(2**63)], 2, "below 2^63"),
        (["--steps", "0"], 2, "--steps"),
        (["--nnodes", "2"], 2, "2 hosts need a place to meet"),
        (["--data", "/nowhere"], 2, "no such file or folder: /nowhere"),
        (["--tokenizer", "gpt2", "--data", __file__], 2, "unknown tokenizer 'gpt2'"),
        (["--tokenizer", "gpt2"], 2, "unknown tokenizer 'gpt2'"),
        (["--rdzv-endpoint", "x:y:z"], 2, "hosts cannot meet at 'x:y:z'"),
        (["--run-dir", "a" * 300], 2, "error[MF507]: cannot write the run folder"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    plan: Path, tmp_path: Path, flags: list[str], code: int, words: str
) -> None:
    result = mfsdp("train", plan, "--run-dir", tmp_path / "run", *flags, code=code)
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_plans_that_cannot_run_are_refused(plan: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide.json"
    mfsdp("plan", "llama-tiny", "--tp", "2", "--pp", "1", "--out", wide, code=1)
    result = mfsdp("train", wide, cwd=tmp_path, code=1)
    assert "error[MF509]: the plan has" in result.stderr

    edited = json.loads(plan.read_text())
    edited["schedule"]["digest"] = "0" * 64
    (tmp_path / "edited.json").write_text(json.dumps(edited))
    result = mfsdp("train", tmp_path / "edited.json", cwd=tmp_path, code=2)
    assert "digest" in result.stderr

    for name, text in (("empty", b""), ("binary", b"\xff\x00" * 100), ("other", b'{"a": 1}')):
        (tmp_path / name).write_bytes(text)
        assert "error[MF208]" in mfsdp("train", tmp_path / name, cwd=tmp_path, code=2).stderr
    assert "error[MF" in mfsdp("train", tmp_path / "absent", cwd=tmp_path, code=2).stderr
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_equals_one_that_was_not_cut_short(plan: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = ["--no-tensorboard", "--lr-warmup-steps", "0"]
    mfsdp("train", plan, "--steps", "4", *common, "--run-dir", whole)
    saving = ["--save-interval", "2", "--run-dir", parts]
    mfsdp("train", plan, "--steps", "2", *common, *saving)
    again = mfsdp("train", plan, "--steps", "2", "--resume", *common, *saving, code=2)
    assert "nothing is left to do" in again.stderr
    mfsdp("train", plan, "--steps", "4", "--resume", *common, *saving)
    losses = [
        {line["step"]: line["loss"] for line in _lines(folder) if line["kind"] == "train"}
        for folder in (whole, parts)
    ]
    assert list(losses[1]) == [1, 2, 3, 4]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert {"kind": "resume", "step": 2} in _lines(parts)
    assert _status(parts) == "completed"
    judged = mfsdp("compare-runs", whole, parts, "--rel-tolerance", "1e-6", "--json")
    assert json.loads(judged.stdout)["train"]["common"] == 4


def test_usage_errors_are_found_without_torch(plan: Path) -> None:
    script = (
        "import sys; sys.argv = ['mfsdp', 'train', sys.argv[1], '--data', '/nowhere']\n"
        "from mfsdp_cli.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n"
        "    assert end.code == 2\n    assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(plan)], check=True, timeout=60)
