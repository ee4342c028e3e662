"""Joining flags with a file, resolving sizes and settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from mfsdp_cli.model.presets import preset
from mfsdp_cli.parallel import Settings
from mfsdp_cli.planning.request import join_sizes
from mfsdp_cli.planning.settings import resolve_settings
from mfsdp_cli.planning.sizes import check_counts, resolve_parallel
from tests.helpers.inline import inline

TINY = preset("llama-tiny")
FILE = """
--num-layers 8 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 256
--vocab-size 256 --make-vocab-size-divisible-by 1 --seq-length 128
--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*5|t*3L
--micro-batch-size 2 --global-batch-size 8
"""


def test_a_flag_on_the_split_replaces_the_files_own() -> None:
    file = {"pipeline_model_parallel_layout": "Et|tL", "micro_batch_size": 4}
    assert join_sizes({"decoder_last_pipeline_num_layers": 3}, file) == {
        "decoder_last_pipeline_num_layers": 3,
        "micro_batch_size": 4,
    }
    uneven = {"decoder_first_pipeline_num_layers": 3, "num_virtual_stages_per_pipeline_rank": 2}
    assert join_sizes({"pipeline_model_parallel_layout": "Et|tL"}, uneven) == {
        "pipeline_model_parallel_layout": "Et|tL"
    }
    assert join_sizes({"num_layers_per_virtual_pipeline_stage": 2}, uneven) == {
        "decoder_first_pipeline_num_layers": 3,
        "num_layers_per_virtual_pipeline_stage": 2,
    }


def test_the_layout_of_a_file_becomes_the_layout(tmp_path: Path) -> None:
    file = tmp_path / "run.args"
    file.write_text(FILE)
    document = inline("plan", file, "--json").document
    assert document["layout"]["decoder_layers_per_pp_rank"] == [5, 3]
    assert document["parallel"]["num_microbatches"] == 4
    other = inline("plan", file, "--decoder-last-pipeline-num-layers", "2", "--json").document
    assert other["layout"]["decoder_layers_per_pp_rank"] == [6, 2]
    larger = inline("plan", file, "--mbs", "4", "--json").document["parallel"]
    assert (larger["micro_batch_size"], larger["num_microbatches"]) == (4, 2)


@pytest.mark.parametrize("value", [0, -1, True, "2", 1.5, 10**10, [2]])
def test_a_count_that_is_none(value: object) -> None:
    (finding,) = check_counts({"global_batch_size": value})
    assert finding.code == "MF201"
    assert finding.where == "--global-batch-size"
    assert repr(value) in finding.message


def test_counts_that_were_not_given_are_fine() -> None:
    assert check_counts({}) == []
    assert check_counts({"world_size": None}) == []


def test_all_sizes_from_few() -> None:
    parallel, findings = resolve_parallel({"world_size": 12}, TINY, pp=3, vpp=2)
    assert findings == []
    assert parallel is not None
    assert parallel.data_parallel_size == 4
    assert parallel.global_batch_size == 4 * 3 * 4
    assert parallel.num_microbatches == 12


def test_experts_cannot_be_divided_by_tensors() -> None:
    sizes = {"expert_tensor_parallel_size": 2}
    _, findings = resolve_parallel(sizes, preset("deepseek-v3"), pp=1, vpp=1)
    assert [finding.code for finding in findings] == ["MF204"]


def test_defaults_of_settings_follow_vpp() -> None:
    plain, _ = resolve_settings({}, vpp=1)
    assert plain == Settings()
    interleaved, _ = resolve_settings({}, vpp=2)
    assert interleaved.schedule == "interleaved-1f1b"
    assert interleaved.overlap_p2p_communication
    assert interleaved.resident_chunks == 2


def test_schedules_as_torch_spells_them() -> None:
    assert resolve_settings({"schedule": "1F1B"}, vpp=1)[0].schedule == "1f1b"
    _, (finding,) = resolve_settings({"schedule": "1F1BX"}, vpp=1)
    assert "1F1BX" in finding.message


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"precision": "fp64"}, "fp32, bf16, fp16"),
        ({"precision": 16}, "a text"),
        ({"resident_chunks": -1}, "at least 0"),
        ({"resident_chunks": True}, "an integer"),
        ({"fp16_loss": 1}, "no setting"),
        ({"sequence_parallel": "yes"}, "true or false"),
    ],
)
def test_a_setting_that_is_none_of_its_choices(given: dict, text: str) -> None:
    _, (finding,) = resolve_settings(given, vpp=1)
    assert finding.code == "MF205"
    assert text in finding.message
