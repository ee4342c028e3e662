"""``mfsdp validate``: every rule, every invariant, and the numbers against one rank."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from mfsdp_cli.commands.flags import PlanFlags
from mfsdp_cli.commands.splice import takes_plan_flags
from mfsdp_cli.errors import ExitCode, MfsdpError
from mfsdp_cli.output import output
from mfsdp_cli.planning.reader import is_plan, read_plan
from mfsdp_cli.planning.request import PlanningFaults
from mfsdp_cli.planning.validation import Report, validate_plan, validate_request
from mfsdp_cli.rules.table import Target
from mfsdp_cli.runtime.limits import unbuildable

_BACKENDS = ("auto", "gloo", "nccl")


@takes_plan_flags
def validate(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[PLAN|MODEL|RUN_DIR]",
            help="A plan file, a model with plan flags, or the folder of a traced run.",
        ),
    ] = None,
    *,
    flags: PlanFlags,
    target: Annotated[
        Target,
        typer.Option(help="Whose rules weigh in full: the engine here, or Megatron's own."),
    ] = Target.MFSDP,
    schedule_csv: Annotated[
        Path | None,
        typer.Option("--schedule-csv", help="Check the orders in torch pipelining's CSV."),
    ] = None,
    p2p: Annotated[
        str,
        typer.Option(
            "--p2p",
            help="For --schedule-csv: rendezvous (a send waits for its receive) or buffered.",
        ),
    ] = "rendezvous",
    numeric: Annotated[
        bool,
        typer.Option("--numeric", help="Run the layout and the one-rank reference, and compare."),
    ] = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of --numeric.")] = 10,
    backend: Annotated[
        str, typer.Option("--backend", help="Of --numeric: auto, gloo or nccl.")
    ] = "gloo",
    ranks_per_device: Annotated[
        int,
        typer.Option(
            "--ranks-per-device", min=1, help="Of --numeric: ranks on one GPU; a rehearsal."
        ),
    ] = 1,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", help="Of --numeric: largest relative difference."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Of --numeric: the model itself, not a small proxy.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Prove a plan: rules, layout, schedule; with --numeric also every gradient."""
    try:
        if schedule_csv is not None:
            report = _of_csv(subject, flags, schedule_csv, p2p)
        else:
            report = _of_subject(subject, flags, target)
        if numeric:
            _add_numeric(report, steps, (_backend(backend), ranks_per_device), tolerance, full)
    except PlanningFaults as faults:
        output.findings(faults.findings)
        raise typer.Exit(faults.exit_code) from faults
    if json:
        output.json(report.to_json())
    else:
        _show(report)
    if not report.ok:
        raise typer.Exit(ExitCode.PROBLEM)


def _of_csv(subject: str | None, flags: PlanFlags, path: Path, p2p: str) -> Report:
    """Judge the orders of a CSV file; nothing else may be asked for."""
    from mfsdp_cli.schedule.csv_reader import check_csv, read_csv_text

    if subject is not None or flags.given():
        other = subject if subject is not None else f"--{flags.given()[0].replace('_', '-')}"
        raise MfsdpError(
            "MF901",
            f"--schedule-csv is checked by itself, but {other} is given too",
            where=f"--schedule-csv {path}",
        )
    report = Report()
    report.add_checks(check_csv(read_csv_text(path), p2p=p2p))
    return report


def _of_subject(subject: str | None, flags: PlanFlags, target: Target) -> Report:
    if subject is None:
        raise MfsdpError(
            "MF901",
            "nothing to validate",
            hint="mfsdp validate PLAN, MODEL with plan flags, RUN_DIR, or --schedule-csv FILE",
        )
    path = Path(subject)
    if os.path.isfile(path / "run.json"):
        _refuse_flags(flags, f"the run {subject}")
        return _of_run(path)
    if os.path.isfile(path) and is_plan(_beginning(path)):
        _refuse_flags(flags, f"the plan {subject}")
        plan, contradictions = read_plan(path, target=target)
        return validate_plan(plan, contradictions, target=target)
    return validate_request(flags.request(subject), target=target, limits=unbuildable)


def _of_run(folder: Path) -> Report:
    from mfsdp_cli.runtime.traced import check_run

    report = Report()
    report.add_checks(check_run(folder))
    return report


def _add_numeric(
    report: Report,
    steps: int,
    where: tuple[str, int],
    tolerance: float | None,
    full: bool,
) -> None:
    """Run the numeric comparison where the plan has no error; it would stop at the same one.

    Args:
        where: the backend, and how many ranks share a GPU.
    """
    if report.plan is None or not report.ok:
        if report.ok:
            raise MfsdpError("MF901", "--numeric needs a plan or a model", where="--numeric")
        output.log("numeric validation is left out: the findings above come first")
        return
    from mfsdp_cli.runtime.numeric import run_numeric

    with tempfile.TemporaryDirectory(prefix="mfsdp-validate-") as folder:
        file = Path(folder, "plan.json")
        report.plan.save(file)
        result = run_numeric(
            report.plan,
            file,
            steps=steps,
            backend=where[0],
            ranks_per_device=where[1],
            tolerance=tolerance,
            full=full,
            say=output.log,
        )
    report.numeric = result.document
    report.findings += result.findings


def _backend(name: str) -> str:
    if name not in _BACKENDS:
        raise MfsdpError(
            "MF901", f"unknown backend {name!r}", where="--backend", hint="auto, gloo or nccl"
        )
    return name


def _refuse_flags(flags: PlanFlags, what: str) -> None:
    """A plan is judged as it is; flags would describe another one."""
    if names := flags.given():
        flag = f"--{names[0].replace('_', '-')}"
        raise MfsdpError(
            "MF901",
            f"{what} is judged as it is; {flag} would make it another one",
            where=flag,
            hint="make a new plan with mfsdp plan",
        )


def _beginning(path: Path) -> str:
    """The file's text; empty where it cannot be read, for the model reader to say why."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _show(report: Report) -> None:
    from mfsdp_cli.commands.validate_view import validate_view

    output.draw(*validate_view(report))
    output.findings(report.findings)
