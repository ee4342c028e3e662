"""What a schedule specification refuses, and Megatron's rules on microbatch counts."""

import json
from dataclasses import replace

import pytest

from mfsdp_cli.errors import MfsdpError, Severity
from mfsdp_cli.schedule.spec import (
    PLANNED,
    SUPPORTED,
    ScheduleSpec,
    canonical_name,
    default_name,
    microbatch_findings,
)
from tests.helpers.schedules import spec


def refused(**fields):
    values = {"name": "1f1b", "pp": 2, "vpp": 1, "num_microbatches": 4, "group_size": 2}
    with pytest.raises(MfsdpError) as error:
        ScheduleSpec(**{**values, **fields})
    return error.value.finding


def test_json_round_trip():
    given = spec(4, 2, 8, tied_pp_ranks=((0, 3),), router_bias=True, resident_chunks=2)
    assert ScheduleSpec.from_json(json.loads(json.dumps(given.to_json()))) == given


@pytest.mark.parametrize("document", [{}, {"name": "1f1b"}, {"tied_pp_ranks": 3}])
def test_malformed_json_is_refused(document):
    with pytest.raises(MfsdpError, match="MF305"):
        ScheduleSpec.from_json(document)


def test_stages_lie_on_ranks_in_a_loop():
    given = spec(4, 3, 8)
    assert [given.rank_of(stage) for stage in range(12)] == [0, 1, 2, 3] * 3
    assert given.num_stages == 12


@pytest.mark.parametrize("name", SUPPORTED)
def test_names_in_any_case(name):
    assert canonical_name(f" {name.upper()} ") == name
    assert canonical_name(name.replace("-", "_")) == name


def test_default_name_follows_the_virtual_stages():
    assert [default_name(vpp) for vpp in (1, 2, 4)] == ["1f1b", *["interleaved-1f1b"] * 2]


@pytest.mark.parametrize("name", ["1F1BX", "", "gpipe", "1f1b interleaved"])
def test_unknown_name_lists_valid_ones(name):
    finding = refused(name=name)
    assert finding.code == "MF302"
    assert all(valid in finding.message for valid in SUPPORTED)


@pytest.mark.parametrize("name", PLANNED)
def test_names_of_later_schedules_say_so(name):
    finding = refused(name=name)
    assert finding.code == "MF302"
    assert f"{name} is not supported yet" in finding.message
    assert all(valid in finding.message for valid in SUPPORTED)


def test_1f1b_with_looped_stages_is_refused():
    finding = refused(name="1F1B", vpp=2)
    assert finding.code == "MF303"
    assert "2 virtual stages" in finding.message
    assert "interleaved-1f1b" in finding.hint


def test_interleaved_needs_virtual_stages():
    assert refused(name="interleaved-1f1b").code == "MF303"


@pytest.mark.parametrize(
    "fields",
    [
        {"pp": 0},
        {"pp": -1},
        {"pp": 2.0},
        {"pp": "2"},
        {"pp": True},
        {"vpp": 0},
        {"num_microbatches": 0},
        {"group_size": 0},
        {"group_size": None},
        {"resident_chunks": -1},
        {"num_microbatches": 10**12},
        {"gradient_reduction": "never"},
        {"tied_pp_ranks": ((0, 2),)},
        {"tied_pp_ranks": ((0, 0),)},
        {"tied_pp_ranks": ((),)},
    ],
)
def test_sizes_out_of_range(fields):
    finding = refused(**fields)
    assert finding.code == "MF305"
    assert finding.message


def only(given, **more):
    [finding] = microbatch_findings(given, **more)
    return finding


def test_fewer_microbatches_than_ranks_under_interleaving():
    finding = only(spec(6, 2, 3), origin="global batch 3 / (micro batch 1 x data parallel 1)")
    assert finding.code == "MF304"
    assert finding.severity is Severity.ERROR
    assert "3 microbatches (global batch 3 / (micro batch 1 x data parallel 1))" in finding.message
    assert "6 pipeline ranks" in finding.message
    assert "at least 6" in finding.message


@pytest.mark.parametrize(("pp", "microbatches", "share"), [(8, 1, "87.5%"), (4, 3, "50.0%")])
def test_few_microbatches_under_1f1b_are_a_warning(pp, microbatches, share):
    finding = only(spec(pp, 1, microbatches))
    assert finding.severity is Severity.WARNING
    assert share in finding.message


@pytest.mark.parametrize("group", [1, 3, 9])
def test_group_size_between_ranks_and_microbatches(group):
    finding = only(spec(4, 2, 8, group_size=group))
    assert finding.severity is Severity.ERROR
    assert str(group) in finding.message


@pytest.mark.parametrize(("microbatches", "group"), [(9, 4), (10, 4), (11, 4), (11, 8)])
def test_short_last_group(microbatches, group):
    finding = only(spec(4, 2, microbatches, group_size=group))
    assert finding.severity is Severity.ERROR
    assert f"last group of {microbatches % group}" in finding.message


@pytest.mark.parametrize(
    ("pp", "microbatches", "group"), [(4, 4, 4), (4, 12, 8), (2, 5, 3), (4, 13, 9), (1, 3, 1)]
)
def test_counts_that_megatron_takes(pp, microbatches, group):
    assert microbatch_findings(spec(pp, 2, microbatches, group_size=group)) == []


def test_specs_are_values():
    assert spec(2, 1, 4) == spec(2, 1, 4)
    assert hash(spec(2, 1, 4)) == hash(replace(spec(2, 1, 8), num_microbatches=4))
