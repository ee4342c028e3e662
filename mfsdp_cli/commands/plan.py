"""``mfsdp plan``: a layout, what it costs, and the file the other commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mfsdp_cli.commands.flags import PlanFlags
from mfsdp_cli.commands.splice import takes_plan_flags
from mfsdp_cli.errors import ExitCode, MfsdpError
from mfsdp_cli.files import refuse_same_file
from mfsdp_cli.output import output
from mfsdp_cli.plan import Plan, json_text
from mfsdp_cli.planning.build import build_plan
from mfsdp_cli.planning.request import PlanningFaults
from mfsdp_cli.rules.table import Target
from mfsdp_cli.runtime.limits import unbuildable


def _list_presets(wanted: bool) -> None:
    if wanted:
        from mfsdp_cli.commands.plan_view import preset_table

        output.draw(preset_table())
        raise typer.Exit


@takes_plan_flags
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A preset, a Hugging Face config.json or its folder, Megatron arguments (.sh, "
            ".txt, .args) or Megatron YAML.",
        ),
    ],
    flags: PlanFlags,
    target: Annotated[
        Target,
        typer.Option(help="Whose rules weigh in full: the engine here, or Megatron's own."),
    ] = Target.MFSDP,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the plan to this file.")
    ] = None,
    graph: Annotated[
        Path | None,
        typer.Option(
            "--graph",
            help="Write the schedule graph; by suffix .json, .csv, .trace.json, .graphml or .svg.",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", min=1, help="How many ranked candidates to show.")
    ] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print the plan document.")] = False,
    list_presets: Annotated[
        bool,
        typer.Option(
            "--list-presets",
            callback=_list_presets,
            is_eager=True,
            help="List the models known by name.",
        ),
    ] = False,
) -> None:
    """Plan a pipeline-parallel layout: stages, memory, schedule, Megatron's flags."""
    _refuse_overwriting(model, flags.hardware, out, graph)
    try:
        made = build_plan(flags.request(model, top=top), target=target, limits=unbuildable)
    except PlanningFaults as faults:
        output.findings(faults.findings)
        raise typer.Exit(faults.exit_code) from faults
    if out is not None:
        made.save(out)
    if graph is not None:
        _write_graph(made, graph, flags)
    if json:
        output.data(json_text(made.document).rstrip("\n"))
    else:
        _show(made, out)
    output.findings(made.findings)
    if made.errors:
        raise typer.Exit(ExitCode.PROBLEM)


def _refuse_overwriting(
    model: str, hardware: str | None, out: Path | None, graph: Path | None
) -> None:
    """Raise MF207 where a file to be written is one that is read, or both are the same."""
    inputs: list[tuple[str, str | Path | None]] = [
        ("the model", model),
        ("the model", Path(model, "config.json")),
        ("the hardware's file", hardware),
    ]
    refuse_same_file("--out", out, inputs)
    refuse_same_file("--graph", graph, inputs)
    if out is not None and graph is not None and out.absolute() == graph.absolute():
        raise MfsdpError(
            "MF207",
            f"plan and schedule graph would be written to the same file {out}",
            where="--out, --graph",
            hint="name two files",
        )


def _show(made: Plan, out: Path | None) -> None:
    from mfsdp_cli.commands.plan_view import plan_view

    output.draw(*plan_view(made, out, width=output.console().width))


def _write_graph(made: Plan, path: Path, flags: PlanFlags) -> None:
    from mfsdp_cli.cost.hardware import DEFAULT_NAME, load_hardware
    from mfsdp_cli.planning.graph_costs import graph_costs
    from mfsdp_cli.schedule.export import write_graph

    name = DEFAULT_NAME if flags.hardware is None else flags.hardware
    hardware = load_hardware(name, gpus_per_node=flags.gpus_per_node)
    write_graph(made.schedule, path, graph_costs(made, hardware))
