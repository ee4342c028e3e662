"""Short ways to specs, schedules and checks for the schedule room's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mfsdp_cli.schedule.actions import Action, parse_action
from mfsdp_cli.schedule.build import Schedule, build_schedule
from mfsdp_cli.schedule.proof import FAIL, Check
from mfsdp_cli.schedule.spec import ScheduleSpec, default_name


def spec(pp: int, vpp: int, microbatches: int, **more: Any) -> ScheduleSpec:
    """A spec with the schedule that its sizes ask for; group size PP unless given."""
    group = more.pop("group_size", pp)
    return ScheduleSpec(more.pop("name", default_name(vpp)), pp, vpp, microbatches, group, **more)


def schedule(pp: int, vpp: int, microbatches: int, **more: Any) -> Schedule:
    """The schedule of :func:`spec`."""
    return build_schedule(spec(pp, vpp, microbatches, **more))


def actions(text: str) -> list[Action]:
    """Actions separated by blanks."""
    return [parse_action(word) for word in text.split()]


def rows(text: str) -> list[list[Action]]:
    """A line a rank."""
    return [actions(line) for line in text.strip().splitlines()]


def with_lists(base: Schedule, lists: list[list[Action]]) -> Schedule:
    """A schedule that claims to be ``base`` but runs other lists."""
    return replace(base, actions=lists)


def failed(checks: list[Check]) -> set[str]:
    """Codes of the checks that failed."""
    return {check.code for check in checks if check.status == FAIL}


def by_code(checks: list[Check], code: str) -> Check:
    """The one check with a code."""
    [check] = [check for check in checks if check.code == code]
    return check
