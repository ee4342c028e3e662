"""What ``mfsdp plan`` shows a person."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mfsdp_cli.plan import Plan

if TYPE_CHECKING:
    from rich.console import RenderableType


def plan_view(plan: Plan, out: Path | None) -> list[RenderableType]:
    """The stages as a table."""
    from rich.table import Table

    table = Table("stage", "layers")
    for stage in plan.layout.stages:
        table.add_row(str(stage.stage), str(len(stage.layers)))
    return [table]


def preset_table() -> RenderableType:
    """The models known by name."""
    from rich.table import Table

    from mfsdp_cli.model.presets import preset_names

    table = Table("preset")
    for name in preset_names():
        table.add_row(name)
    return table
