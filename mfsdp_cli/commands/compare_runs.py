"""``mfsdp compare-runs``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mfsdp_cli.compare.run import Axis
from mfsdp_cli.errors import ExitCode, MfsdpError
from mfsdp_cli.files import refuse_same_file
from mfsdp_cli.output import output

if TYPE_CHECKING:
    from mfsdp_cli.compare.judge import Comparison


def compare_runs(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [C ...]",
            help="Runs: a run folder, a metrics.jsonl or other JSON lines, TensorBoard events,"
            " a Megatron or torchtitan log, a W&B history. Each is compared with the first.",
            show_default=False,
        ),
    ],
    metric: Annotated[
        str | None,
        typer.Option(
            help="Compare this logged value (or: loss, validation) alone.", show_default=False
        ),
    ] = None,
    abs_tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest difference allowed. Default: 0.02 or 0.5%, whichever is larger;"
            " giving one tolerance sets the other to 0.",
            show_default=False,
        ),
    ] = None,
    rel_tolerance: Annotated[
        float | None,
        typer.Option(help="The same relative to |A|: 0.005 is 0.5%.", show_default=False),
    ] = None,
    x: Annotated[
        Axis, typer.Option("--x", help="Align by step, or by samples or tokens seen.")
    ] = Axis.STEP,
    allow_nan: Annotated[
        bool,
        typer.Option("--allow-nan", help="Leave NaN, infinite and missing values out."),
    ] = False,
    png: Annotated[
        Path | None, typer.Option(help="Draw both curves into FILE.", metavar="FILE")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Not available yet: use --png.", metavar="FILE")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Judge whether runs are the same: exit code 0 if they are, 1 if they differ.

    Evaluations are judged where both runs have them, otherwise the training loss.
    """
    from mfsdp_cli.compare.compare_paths import compare_paths
    from mfsdp_cli.compare.document import verdict_of
    from mfsdp_cli.compare.judge import Policy, tolerance

    if html is not None:
        raise MfsdpError(
            "MF608",
            "an HTML report is not available yet",
            where=f"--html {html}",
            hint="use --png FILE for a picture, --json for the numbers",
        )
    refuse_same_file("--png", png, [("a run that is compared", run) for run in runs])
    policy = Policy(tolerance(abs_tolerance, rel_tolerance), allow_nan, x, metric)
    comparisons = compare_paths(runs, policy)
    if png is not None:
        from mfsdp_cli.compare.picture import draw

        draw(comparisons, png)
    _show(comparisons, as_json=json)
    raise typer.Exit(ExitCode.OK if verdict_of(comparisons).passed else ExitCode.PROBLEM)


def _show(comparisons: Sequence[Comparison], *, as_json: bool) -> None:
    """The JSON document; or values, then warnings on stderr, then the verdict as the last line."""
    from mfsdp_cli.compare.caveats import all_warnings
    from mfsdp_cli.compare.document import document

    if as_json:
        output.json(document(comparisons))
        return
    from mfsdp_cli.compare.report import report, verdict_lines

    output.draw(*report(comparisons, output.console().width), "")
    output.findings(all_warnings(comparisons))
    output.draw(*verdict_lines(comparisons))
