from __future__ import annotations

from pathlib import Path

from mfsdp_cli.compare.caveats import all_warnings
from mfsdp_cli.compare.compare_paths import compare_paths
from mfsdp_cli.compare.judge import Policy
from mfsdp_cli.compare.run import Axis
from mfsdp_cli.errors import Severity
from tests.helpers.runs import DATA, losses, megatron_line, run_folder, write_rows

SAME = {1: 5.0, 2: 4.0}


def warned(*paths: Path, **policy: object) -> dict[str, list[str]]:
    """Messages by code."""
    found: dict[str, list[str]] = {}
    comparisons = compare_paths([str(p) for p in paths], Policy(**policy))  # type: ignore[arg-type]
    for warning in all_warnings(comparisons):
        assert warning.severity is Severity.WARNING
        found.setdefault(warning.code, []).append(warning.message)
    return found


def test_equal_runs_have_none(tmp_path: Path) -> None:
    a = run_folder(tmp_path / "a", SAME, {2: 4.5}, engine="mfsdp", backend="gloo")
    b = run_folder(tmp_path / "b", SAME, {2: 4.5}, engine="distopt", backend="nccl")
    assert warned(a, b) == {}


def test_settings_that_differ_are_named_with_both_values(tmp_path: Path) -> None:
    a = run_folder(tmp_path / "a", SAME, settings={"lr": 1e-3, "adam_eps": 1e-8})
    b = run_folder(
        tmp_path / "b",
        SAME,
        seed=7,
        data_digest="other",
        precision="bf16",
        settings={"lr": 2e-3, "adam_eps": 1e-8},
    )
    assert warned(a, b)["MF613"] == [
        "the runs differ in data_digest: A d, B other",
        "the runs differ in lr: A 0.001, B 0.002",
        "the runs differ in precision: A fp32, B bf16",
        "the runs differ in seed: A 1234, B 7",
    ]


def test_models_that_differ(tmp_path: Path) -> None:
    folders = []
    for name in ("llama-tiny", "gpt2-tiny"):
        folders.append(run_folder(tmp_path / name, SAME))
        (folders[-1] / "plan.json").write_text(f'{{"model": {{"name": "{name}"}}}}')
    assert warned(*folders)["MF613"] == ["the runs differ in model.name: A llama-tiny, B gpt2-tiny"]


def test_batch_sizes_name_both(tmp_path: Path) -> None:
    a = run_folder(tmp_path / "a", SAME)
    b = run_folder(tmp_path / "b", SAME, global_batch_size=16)
    assert warned(a, b)["MF612"] == [
        "the global batch sizes differ: A 8, B 16; the same step is not the same number of samples"
    ]
    by_samples = warned(a, b, axis=Axis.SAMPLES)
    assert by_samples["MF612"] == ["the global batch sizes differ: A 8, B 16"]


def test_ends_and_statuses(tmp_path: Path) -> None:
    a = run_folder(tmp_path / "a", {1: 5.0, 2: 4.0, 3: 3.0}, status=None)
    b = run_folder(tmp_path / "b", SAME, status="interrupted")
    found = warned(a, b)
    assert found["MF614"] == ["A ends at step 3, B at step 2"]
    assert found["MF618"] == [
        "A: the run has no end: it still runs or was killed",
        "B: the run was interrupted",
    ]


def test_evaluations_of_one_run_only(tmp_path: Path) -> None:
    a = run_folder(tmp_path / "a", SAME)
    b = run_folder(tmp_path / "b", SAME, {2: 4.5})
    assert warned(a, b)["MF615"] == ["only B has evaluations: the training losses are judged"]
    c = run_folder(tmp_path / "c", SAME, {1: 4.6, 2: 4.5})
    assert warned(c, b)["MF615"] == ["evaluations without a counterpart: 1 in A, 0 in B"]


def test_repeated_and_skipped_steps() -> None:
    found = warned(DATA / "c08_tb_multi", DATA / "c02_fp16_skips.log")
    assert found["MF611"] == ["A: 10 steps came more than once (41-50): the last value counts"]
    assert found["MF616"] == ["B: the optimizer skipped 3 steps"]
    assert found["MF617"][0].startswith("A logs every step, B every 10 steps")


def test_a_resumed_record_that_never_reached_its_old_end(tmp_path: Path) -> None:
    a = losses(tmp_path / "a.jsonl", {1: 5.0, 2: 4.0, 3: 3.0})
    b = write_rows(tmp_path / "b.jsonl", [{"step": s, "loss": 5.0} for s in (1, 2, 3, 2)])
    assert warned(a, b)["MF610"] == [
        "B: loss: the record went back and ends at step 2; later steps are from before that"
    ]


def test_other_names_for_the_loss(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(megatron_line(step, loss) for step, loss in SAME.items()))
    b = losses(tmp_path / "b.jsonl", SAME)
    assert warned(log, b)["MF619"] == ['the training loss is "lm loss" in A and "loss" in B']


def test_a_run_against_itself(tmp_path: Path) -> None:
    a = losses(tmp_path / "a.jsonl", SAME)
    (tmp_path / "link").symlink_to(a)
    assert warned(a, tmp_path / "link") == {"MF622": ["A and B are the same files"]}


def test_points_that_have_no_place_on_the_axis(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": 5.0, "samples": t} for s, t in ((1, 8), (2, 16), (4, 64))]
    a = write_rows(tmp_path / "a.jsonl", [*rows, {"step": 3, "val_loss": 5.0}])
    b = write_rows(tmp_path / "b.jsonl", rows)
    found = warned(a, b, axis=Axis.SAMPLES)
    assert found["MF620"] == ["A: 1 points have no known number of samples: left out"]


def test_what_allow_nan_leaves_out_is_said(tmp_path: Path) -> None:
    a = losses(tmp_path / "a.jsonl", SAME)
    b = losses(tmp_path / "b.jsonl", {1: 5.0, 2: "nan", 3: None})
    found = warned(a, b, allow_nan=True)
    assert found["MF621"] == ["B: 2 NaN, infinite or missing values are left out"]


def test_each_warning_once_with_several_runs(tmp_path: Path) -> None:
    a = run_folder(tmp_path / "a", SAME, status="interrupted")
    b, c = run_folder(tmp_path / "b", SAME), run_folder(tmp_path / "c", SAME)
    assert warned(a, b, c) == {"MF618": ["A: the run was interrupted"]}
