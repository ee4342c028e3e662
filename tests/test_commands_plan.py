"""``mfsdp plan`` as scripts call it: counts, layouts, sizes, defaults, refusals."""

from __future__ import annotations

import json
import os
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest

from mfsdp_cli.plan import Plan
from tests.helpers.cli import mfsdp
from tests.helpers.inline import inline

CONFIGS = Path(__file__).parent / "data" / "configs"
MTP_LAYOUT = ("--layout", "Et*8|t*8|m|L")
DEEPSEEK_LAYOUT = "Et*3|(tt|)*29,m|L"


def config(name: str) -> str:
    return str(CONFIGS / f"{name}.json")


def planned(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    said = inline("plan", *arguments, "--json")
    assert said.code == code, said.err
    return said.document


def refused(*arguments: str | Path) -> str:
    """The error of a plan that is impossible: exit 2, nothing on stdout."""
    said = inline("plan", *arguments, "--json")
    assert said.code == 2, said.err
    assert said.out == ""
    return said.err


def rank_parameters(document: dict[str, Any]) -> list[int]:
    return [rank["parameters"] for rank in document["ranks"]]


# Remainder layers, uneven ends, virtual stages.


@pytest.mark.parametrize(
    ("model", "layers", "pp", "allowed"),
    [("smollm2-135m", 30, 4, {7, 8}), ("smollm2-135m", 10, 3, {3, 4}), ("gpt2", 12, 5, {2, 3})],
)
@pytest.mark.parametrize("split", ["balanced", "auto"])
def test_no_layer_vanishes(model: str, layers: int, pp: int, allowed: set[int], split: str) -> None:
    document = planned(
        config(model), "--num-layers", str(layers), "--pp", str(pp), "--split", split
    )
    counts = document["layout"]["decoder_layers_per_pp_rank"]
    assert sum(counts) == layers
    if split == "balanced":
        assert set(counts) <= allowed
    held = [layer for stage in document["layout"]["stages"] for layer in stage["layers"]]
    assert held == list(range(layers))


def test_a_forced_even_split_names_what_it_would_build() -> None:
    error = refused(config("smollm2-135m"), "--pp", "4", "--split", "even")
    assert error.startswith("error[MF104]")
    assert all(number in error for number in ("30", "4 pipeline stages", "28"))


def test_layers_a_virtual_stage_that_do_not_divide() -> None:
    error = refused("llama3-70b", "--pp", "16", "--num-layers-per-virtual-pipeline-stage", "2")
    assert all(number in error for number in ("80", "16", "2", "1 (v=5), 5 (v=1)"))
    right = planned("llama3-70b", "--pp", "16", "--num-layers-per-virtual-pipeline-stage", "1")
    assert right["parallel"]["virtual_pipeline_model_parallel_size"] == 5


def test_uneven_end_with_one_pipeline_rank() -> None:
    flag = "--decoder-last-pipeline-num-layers"
    error = refused("llama3-8b", "--num-layers", "20", "--pp", "1", flag, "1")
    assert all(text in error for text in (flag, "1 of 20 layers"))


@pytest.mark.parametrize(
    ("arguments", "layers", "parameters"),
    [
        (
            [config("qwen3-235b-a22b"), "--pp", "4", "--decoder-last-pipeline-num-layers", "22"],
            [24, 24, 24, 22],
            [60_328_450_048, 59_706_120_192, 59_706_120_192, 55_352_944_128],
        ),
        (
            [config("kimi-k2-instruct"), "--pp", "8", "--decoder-last-pipeline-num-layers", "5"],
            [8] * 7 + [5],
            [121_087_459_328, *[136_474_918_912] * 6, 86_471_236_608],
        ),
        (
            [
                config("deepseek-v3"),
                "--pp",
                "8",
                "--decoder-first-pipeline-num-layers",
                "7",
                "--decoder-last-pipeline-num-layers",
                "6",
            ],
            [7, *[8] * 6, 6],
            [48_706_273_280, *[92_058_288_128] * 6, 69_970_402_304],
        ),
        (
            ["deepseek-v3", "--pp", "4", "--decoder-last-pipeline-num-layers", "13"],
            [16, 16, 16, 13],
            [152_271_847_424, 184_116_576_256, 184_116_576_256, 150_521_404_416],
        ),
        (
            [config("glm-4.5-air"), "--pp", "4", "--layout", "Et*12|t*12|t*12|t*10L"],
            [12, 12, 12, 10],
            [26_620_731_392, 28_097_912_832, 28_097_912_832, 24_035_688_448],
        ),
    ],
    ids=["qwen3-235b", "kimi-k2", "deepseek-v3-pp8", "deepseek-v3-pp4", "glm-4.5-air"],
)
def test_real_uneven_recipes(
    arguments: list[str], layers: list[int], parameters: list[int]
) -> None:
    document = planned(*arguments, "--mtp-num-layers", "0")
    assert document["layout"]["decoder_layers_per_pp_rank"] == layers
    assert rank_parameters(document) == parameters


def test_46_layers_on_4_ranks_still_plan() -> None:
    document = planned(config("glm-4.5-air"), "--pp", "4")
    assert sum(document["layout"]["decoder_layers_per_pp_rank"]) == 46


# Counts.


def test_deepseek_v3_counts() -> None:
    document = planned("deepseek-v3", "--pp", "16", "--vpp", "2", "--layout", DEEPSEEK_LAYOUT)
    counts = document["model"]["parameters"]
    assert counts["total"] == 671_026_404_352
    assert counts["mtp"] == 11_610_067_968
    assert counts["router_bias"] == 14_848
    assert counts["embedding"] == 926_679_040
    held = sum(rank_parameters(document))
    copied = sum(rank["copied_parameters"] for rank in document["ranks"])
    assert copied == 926_679_040
    assert held == counts["total"] + counts["mtp"] + copied


@pytest.mark.parametrize(
    ("model", "total", "assumed"),
    [
        ("gemma-2b", 2_506_172_416, "tied assumed"),
        ("gpt2", 124_439_808, "tied assumed"),
        ("llama-4-scout", 107_769_861_120, "untied assumed"),
        ("deepseek-v2-lite", 15_706_484_224, ""),
        ("llama-3.1-8b", 8_030_261_248, ""),
    ],
)
def test_totals_and_what_was_assumed(model: str, total: int, assumed: str) -> None:
    document = planned(config(model))
    assert document["model"]["parameters"]["total"] == total
    assert assumed in " ".join(document["model"]["assumptions"])


@pytest.mark.parametrize(
    ("model", "layout", "held", "unique"),
    [
        (
            "llama-3.2-1b",
            "Et*4|t*4|t*4|t*4L",
            [505_954_304, 243_286_016, 243_286_016, 505_956_352],
            1_235_814_400,
        ),
        (
            "gpt2",
            "Et*3|t*3|t*3|t*3L",
            [60_647_424, 21_263_616, 21_263_616, 59_862_528],
            124_439_808,
        ),
        (
            "smollm2-135m",
            "Et*8|t*8|t*7|t*7L",
            [56_632_320, 28_320_768, 24_780_672, 53_092_800],
            134_515_008,
        ),
    ],
)
def test_copies_are_counted_where_they_are_held_and_once_in_the_total(
    model: str, layout: str, held: list[int], unique: int
) -> None:
    document = planned(config(model), "--pp", "4", "--layout", layout)
    assert rank_parameters(document) == held
    assert document["model"]["parameters"]["total"] == unique
    copied = [rank["copied_parameters"] for rank in document["ranks"]]
    assert copied == [0, 0, 0, document["model"]["parameters"]["embedding"]]
    stages = document["layout"]["stages"]
    assert [stage["parameters"] for stage in stages] == held
    text = inline("plan", config(model), "--pp", "4", "--layout", layout).out
    assert f"{unique:,} unique, {sum(held):,} over all pipeline ranks" in text


@pytest.mark.parametrize(
    ("arguments", "kind", "ranks"),
    [
        (["deepseek-v3", "--pp", "16", "--vpp", "2", "--layout", DEEPSEEK_LAYOUT], "mtp", [0, 14]),
        (["deepseek-v3", "--pp", "8", "--vpp", "4", "--layout", DEEPSEEK_LAYOUT], "mtp", [0, 6]),
        ([config("llama-3.2-1b"), "--pp", "4"], "tied", [0, 3]),
        ([config("llama-3.2-1b"), "--pp", "1"], None, None),
        ([config("llama-3.1-8b"), "--pp", "4"], None, None),
        (
            [config("llama-3.2-1b"), "--mtp-num-layers", "1", "--pp", "4", *MTP_LAYOUT],
            "tied",
            [0, 2, 3],
        ),
    ],
)
def test_shared_groups(arguments: list[str], kind: str | None, ranks: list[int] | None) -> None:
    groups = planned(*arguments)["shared_groups"]
    if kind is None:
        assert groups == []
        return
    (group,) = groups
    assert (group["kind"], group["pp_ranks"]) == (kind, ranks)
    assert len(group["members"]) == len(ranks or ())


@pytest.mark.parametrize(
    ("model", "divisor", "tp", "padded", "total"),
    [
        ("gpt2", 128, 1, 50304, 124_475_904),
        ("gpt2", 128, 2, 50432, 124_574_208),
        ("gpt2", 128, 4, 50688, 124_770_816),
        ("gpt2", 128, 8, 51200, 125_164_032),
        ("gpt2", 1, 2, 50258, None),
        ("qwen3-0.6b", 128, 2, 152_064, None),
    ],
)
def test_vocabulary_padding(
    model: str, divisor: int, tp: int, padded: int, total: int | None
) -> None:
    document = planned(
        config(model),
        "--make-vocab-size-divisible-by",
        str(divisor),
        "--tp",
        str(tp),
        code=0 if tp == 1 else 1,
    )
    assert document["model"]["padded_vocab_size"] == padded
    if total is not None:
        assert document["model"]["parameters"]["total"] == total
    codes = [finding["code"] for finding in document["findings"]]
    assert ("MF210" in codes) == (tp > 1)


def test_routed_experts_are_divided_by_expert_parallelism() -> None:
    (rank,) = planned(config("qwen3-30b-a3b"), "--ep", "8")["ranks"]
    assert rank["routed_parameters"] == 28_991_029_248 // 8 == 3_623_878_656
    whole = planned(config("qwen3-30b-a3b"))["ranks"][0]
    # Attention, norms and routers are not divided.
    assert (
        rank["parameters"] - rank["routed_parameters"]
        == whole["parameters"] - whole["routed_parameters"]
    )


# Memory of an uneven split.

UNEVEN = """
--num-layers 8 --hidden-size 16 --ffn-hidden-size 64 --num-attention-heads 4
--vocab-size 32 --make-vocab-size-divisible-by 1 --max-position-embeddings 64
--position-embedding-type rope --disable-bias-linear --normalization LayerNorm
--untie-embeddings-and-output-weights --seq-length 64
"""


def test_memory_is_each_ranks_own_not_the_average(tmp_path: Path) -> None:
    arguments = tmp_path / "model.args"
    arguments.write_text(UNEVEN)
    document = planned(arguments, "--layout", "Et|tt|tt|tttL", "--pp", "4", "--world-size", "16")
    assert document["parallel"]["data_parallel_size"] == 4
    held = rank_parameters(document)
    assert max(held) == held[3] == 9_952
    memory = document["ranks"][3]["memory"]
    # Everything is sharded over DP 4: weights, gradients, two averages, fp32.
    shards = 3 * (3_136 // 4) + (32 * 16 + 2 * 16) // 4
    assert memory["main_weights"] == shards * 4 == 9_952
    assert memory["main_gradients"] == 9_952
    assert memory["optimizer_state"] == 2 * 9_952
    assert memory["model_weights"] == 0


def test_experts_are_told_apart_in_an_uneven_split(tmp_path: Path) -> None:
    arguments = tmp_path / "model.args"
    arguments.write_text(
        UNEVEN + "--num-experts 2 --moe-ffn-hidden-size 32 --moe-router-topk 1 "
        "--moe-layer-freq [0,1,0,0,1,0,1,1]"
    )
    document = planned(arguments, "--layout", "Et|tt|tt|tttL", "--pp", "4")
    rank = document["ranks"][3]
    assert rank["routed_parameters"] == 4_096
    assert rank["parameters"] - rank["routed_parameters"] == 5_920


# Bubble and activations in flight.


@pytest.mark.parametrize(
    ("pp", "vpp", "microbatches", "group", "bubble", "live"),
    [
        (4, 1, 8, None, 3 / 11, [4, 3, 2, 1]),
        (4, 2, 8, None, 3 / 19, [11, 9, 7, 5]),
        (4, 2, 4, None, 3 / 11, [8, 8, 7, 5]),
        (8, 5, 64, None, 7 / 327, [47, 45, 43, 41, 39, 37, 35, 33]),
        (2, 2, 5, 3, 1 / 11, [6, 4]),
        (8, 1, 1, None, 7 / 8, [1] * 8),
    ],
)
def test_bubble_and_forwards_in_flight(
    pp: int, vpp: int, microbatches: int, group: int | None, bubble: float, live: list[int]
) -> None:
    flags = ["--pp", str(pp), "--vpp", str(vpp), "--gbs", str(microbatches)]
    if group is not None:
        flags += ["--microbatch-group-size-per-virtual-pipeline-stage", str(group)]
    document = planned("llama-tiny", "--num-layers", "40", *flags)
    schedule = document["schedule"]
    assert schedule["bubble_fraction"] == pytest.approx(bubble, abs=1e-12)
    assert schedule["bubble_ratio"] == pytest.approx(bubble / (1 - bubble), abs=1e-12)
    assert [rank["in_flight_chunks"] for rank in document["ranks"]] == live


def test_the_bubble_is_shown_with_its_definition() -> None:
    text = " ".join(inline("plan", "llama-tiny", "--pp", "4", "--gbs", "8").out.split())
    assert "27.27% of the step (idle / whole)" in text
    assert "37.50% over ideal (idle / ideal)" in text


# Sizes: defaults and contradictions.


def test_defaults() -> None:
    parallel = planned("llama-tiny", "--pp", "2", "--world-size", "8")["parallel"]
    assert parallel["data_parallel_size"] == 4
    assert parallel["micro_batch_size"] == 1
    assert parallel["global_batch_size"] == 4 * 2 * 1 * 4
    assert parallel["num_microbatches"] == 8
    assert parallel["seq_length"] == 256
    assert parallel["microbatch_group_size_per_virtual_pipeline_stage"] == 2
    assert planned("llama3-8b")["parallel"]["seq_length"] == 4096
    smallest = planned(config("qwen3-30b-a3b"), "--pp", "2", "--ep", "4")["parallel"]
    assert smallest["world_size"] == 2 * 4
    assert planned("llama-tiny")["parallel"]["world_size"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        (["--world-size", "6", "--pp", "4"], "MF202", ["6 ranks", "4"]),
        (["--pp", "2", "--world-size", "8", "--gbs", "30"], "MF203", ["30", "4", "28 or 32"]),
        (["--gbs", "3", "--mbs", "2"], "MF203", ["3", "2"]),
        (["--ep", "2"], "MF204", ["no experts"]),
        (["--gbs", "1000000"], "MF235", ["1000000 microbatches", "8 layers", "4000000"]),
        (["--pp", "0"], "MF201", ["0"]),
        (["--gbs", "-4"], "MF201", ["-4"]),
        (["--world-size", "99999999999999999999"], "MF201", ["99999999999999999999"]),
        (["--pp", "2", "--layout", "Et*4|t*4L|"], "MF109", ["L"]),
        (["--pp", "2", "--vpp", "2", "--layout", "Et*4|t*4L"], "MF106", ["2", "1"]),
        (["--pp", "3", "--layout", "Et*4|t*4L"], "MF105", ["2", "3"]),
        (["--layout", "Et*7|L", "--pp", "2"], "MF107", ["7", "8"]),
        (["--layout", "Et*4|x*4L", "--pp", "2"], "MF101", ["x"]),
        (["--layout", "Et*4|t*4L", "--decoder-last-pipeline-num-layers", "4"], "MF115", []),
        (["--split", "evenly", "--pp", "2"], "MF115", ["evenly"]),
        (["--schedule", "1f1bx"], "MF302", ["1f1bx", "1f1b", "interleaved-1f1b"]),
        (["--schedule", "zb-h1"], "MF302", ["zb-h1", "not supported yet"]),
        (["--pp", "2", "--vpp", "2", "--schedule", "1f1b"], "MF303", ["2"]),
        (["--recompute-granularity", "some"], "MF205", ["some", "selective"]),
        (["--resident-chunks", "-1"], "MF205", ["-1"]),
        (["--gradient-reduction", "never"], "MF205", ["never", "microbatch, last"]),
        (["--precision", "int8"], "MF205", ["int8"]),
        (["--bf16", "--fp16"], "MF207", ["bf16", "fp16"]),
        (["--hardware", "abacus"], "MF206", ["abacus", "h100"]),
        (["--hardware", ""], "MF206", ["''", "h100"]),
        (["--hardware", "h" * 5000], "MF206", ["hhhh", "h100"]),
        (["--memory-limit", "nan"], "MF201", ["nan"]),
        (["--memory-limit", "1e308"], "MF201", ["1e+308"]),
        (["--memory-limit", "-1"], "MF201", ["-1"]),
        (["--gpus-per-node", "0"], "MF201", ["0"]),
        (["--pp", "16"], "MF114", ["8 layers", "16"]),
        (["--vpp", "2", "--pp", "1"], "MF116", ["2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_contradictions(arguments: list[str], code: str, texts: list[str]) -> None:
    error = refused("llama-tiny", *arguments)
    assert f"error[{code}]" in error
    assert all(text in error for text in texts)


def test_all_contradictions_are_named_at_once() -> None:
    error = refused("llama-tiny", "--layout", "Et|tL", "--pp", "2", "--gbs", "3", "--mbs", "2")
    assert "error[MF107]" in error
    assert "error[MF203]" in error


def test_too_many_experts_ranks() -> None:
    assert "128 experts do not divide over 7" in refused(config("qwen3-30b-a3b"), "--ep", "7")
    error = refused("deepseek-v3-proxy-tiny", "--ep", "4", "--world-size", "2")
    assert "4 expert-parallel ranks do not divide the 2 ranks" in error


# Findings that are printed and written with the plan.


def test_microbatches_fewer_than_ranks_with_virtual_stages(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    flags = ["--num-layers", "12", "--pp", "6", "--vpp", "2", "--gbs", "3", "--out", str(file)]
    document = planned("llama-tiny", *flags, code=1)
    (error,) = [finding for finding in document["findings"] if finding["severity"] == "error"]
    assert error["code"] == "MF304"
    for text in ("3 microbatches", "global batch 3 / (micro batch 1 x", "at least 6"):
        assert text in error["message"]
    assert json.loads(file.read_text()) == document
    assert [item.code for item in Plan.load(file).errors] == ["MF304"]


def test_a_microbatch_count_that_allows_no_schedule_is_still_printed() -> None:
    flags = ["--num-layers", "12", "--pp", "4", "--vpp", "3", "--gbs", "5"]
    document = planned("llama-tiny", *flags, code=1)
    assert document["schedule"]["bubble_fraction"] is None
    assert document["context"] == []
    assert document["predicted"]["step_time_s"] is None
    assert "cannot be built" in inline("plan", "llama-tiny", *flags).out


@pytest.mark.parametrize(("pp", "batch", "bubble"), [(8, 1, "87.5%"), (4, 3, "50.0%")])
def test_fewer_microbatches_than_ranks_is_a_warning(pp: int, batch: int, bubble: str) -> None:
    document = planned("llama-tiny", "--pp", str(pp), "--gbs", str(batch))
    (warning,) = [item for item in document["findings"] if item["severity"] == "warning"]
    assert bubble in warning["message"]


def test_memory_is_judged_only_where_asked(tmp_path: Path) -> None:
    flags = ["llama3-70b", "--pp", "2", "--world-size", "2"]
    assert planned(*flags)["findings"][0]["severity"] == "note"
    over = planned(*flags, "--memory-limit", "80", "--out", str(tmp_path / "p.json"), code=1)
    (error,) = [item for item in over["findings"] if item["severity"] == "error"]
    assert error["code"] == "MF218"
    assert "80.00 GiB" in error["message"]
    assert (tmp_path / "p.json").exists()
    assert planned(*flags, "--hardware", "h100", code=1)["predicted"]["hardware"] == "h100"
    assert planned(*flags, "--hardware", "h100", "--memory-limit", "10000")["findings"]


def test_a_rank_without_parameters_is_named() -> None:
    document = planned("llama-tiny", "--num-layers", "2", "--pp", "3", "--layout", "Et||tL")
    (warning,) = [item for item in document["findings"] if item["severity"] == "warning"]
    assert "pipeline rank 1" in warning["message"]
    assert document["ranks"][1]["parameters"] == 0
    assert document["ranks"][1]["memory"]["main_weights"] == 0


def test_what_train_cannot_build_is_a_note() -> None:
    document = planned(config("deepseek-v2-lite"), "--pp", "3")
    notes = [item["message"] for item in document["findings"] if item["severity"] == "note"]
    assert any("latent attention with norms" in note for note in notes)
    # MTP layers are trained.
    document = planned("deepseek-v3", "--pp", "16", "--layout", DEEPSEEK_LAYOUT)
    assert "MF217" not in [item["code"] for item in document["findings"]]


# Search.


def test_without_pp_the_pipeline_is_searched() -> None:
    document = planned("llama3-8b", "--world-size", "16", "--bf16", "--hardware", "h100")
    candidates = document["candidates"]
    assert 1 < len(candidates) <= 5
    assert candidates[0]["reason"] == "chosen"
    chosen = document["parallel"]
    for name in ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"):
        assert candidates[0][name] == chosen[name]
    assert candidates[0]["layout"] == document["layout"]["string"]
    assert candidates[0]["step_time_s"] == pytest.approx(document["predicted"]["step_time_s"])
    assert all(item["reason"] for item in candidates)
    times = [item["step_time_s"] for item in candidates if item["reason"].endswith("slower")]
    assert times == sorted(times)


def test_top_says_how_many_candidates() -> None:
    flags = ["llama-tiny", "--world-size", "8"]
    assert len(planned(*flags, "--top", "2")["candidates"]) == 2
    assert planned("llama-tiny", "--pp", "2")["candidates"] == []


def test_vpp_alone_is_searched_with_it() -> None:
    document = planned("llama-tiny", "--world-size", "4", "--vpp", "2")
    assert document["parallel"]["virtual_pipeline_model_parallel_size"] == 2
    assert document["parallel"]["pipeline_model_parallel_size"] in (2, 4)
    smallest = planned("llama-tiny", "--vpp", "2")["parallel"]
    assert (smallest["world_size"], smallest["pipeline_model_parallel_size"]) == (2, 2)


def test_a_layout_string_says_pp() -> None:
    parallel = planned("llama-tiny", "--layout", "Ett|tt|tt|ttL", "--vpp", "2")["parallel"]
    assert parallel["pipeline_model_parallel_size"] == 2
    assert parallel["virtual_pipeline_model_parallel_size"] == 2


# Files.


def test_out_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    error = refused("llama-tiny", "--out", tmp_path / "absent" / "plan.json")
    assert "error[MF902]" in error
    assert refused("llama-tiny", "--out", tmp_path)
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "plan.json"
    file.write_text("old")
    planned("llama-tiny", "--out", file)
    assert Plan.load(file).model.name == "llama-tiny"
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("suffix", [".json", ".csv", ".trace.json", ".graphml", ".svg"])
def test_graph(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"schedule{suffix}"
    planned("llama-tiny", "--pp", "2", "--vpp", "2", "--graph", file)
    assert file.stat().st_size > 1000
    if suffix == ".json":
        nodes = json.loads(file.read_text())["nodes"]
        assert any("decoder.layers.0" in str(node) for node in nodes)


def test_graph_of_an_unknown_suffix() -> None:
    assert "error[MF309]" in refused("llama-tiny", "--graph", "schedule.bmp")


def test_signature_makes_the_same_plan_again() -> None:
    flags = ["--pp", "2", "--vpp", "2", "--world-size", "4", "--gbs", "16", "--bf16"]
    flags += ["--no-overlap-p2p-communication", "--resident-chunks", "0", "--num-layers", "10"]
    flags += ["--hardware", "a100", "--gpus-per-node", "2", "--memory-limit", "0.7"]
    first = planned("gpt2-tiny", *flags, code=1)  # batched between two ranks
    again = planned(*shlex.split(first["signature"])[2:], code=1)
    assert again["plan_digest"] == first["plan_digest"]
    assert again == first


# What a person sees.


@pytest.mark.parametrize("columns", [60, 100, 140])
def test_the_view_fits_the_terminal(columns: int) -> None:
    said = mfsdp(
        "plan", "deepseek-v3", "--pp", "16", "--layout", DEEPSEEK_LAYOUT, COLUMNS=str(columns)
    )
    assert max(map(len, said.stdout.splitlines())) <= columns
    assert ("█" in said.stdout) == (columns >= 76)
    assert "next: mfsdp plan deepseek-v3" in said.stdout
    assert "\x1b" not in said.stdout


def test_list_presets() -> None:
    said = inline("plan", "--list-presets")
    assert said.code == 0
    for name in (
        "deepseek-v3",
        "deepseek-v3-proxy",
        "deepseek-v3-proxy-tiny",
        "llama3-8b",
        "llama3-70b",
        "llama-tiny",
        "gpt2",
        "gpt2-tiny",
    ):
        assert name in said.out.split()


def test_errors_end_with_what_to_do_next() -> None:
    said = inline("plan", "llama-tiny", "--tp", "2")
    assert said.code == 1
    assert "mend the errors below" in said.out
    assert "error[MF210]" in said.err
