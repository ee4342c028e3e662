"""The ``mfsdp`` application: commands, and errors turned into messages and exit codes."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from mfsdp_cli import __version__
from mfsdp_cli.commands.compare_runs import compare_runs
from mfsdp_cli.commands.plan import plan
from mfsdp_cli.commands.train import train
from mfsdp_cli.commands.validate import validate
from mfsdp_cli.errors import ExitCode, Finding, MfsdpError, Severity
from mfsdp_cli.output import output

app = typer.Typer(
    name="mfsdp",
    help="Plan, prove, run and compare pipeline-parallel layouts for Megatron-FSDP v2.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan")(plan)
app.command("validate")(validate)
app.command("train")(train)
app.command("compare-runs")(compare_runs)


def _print_version(wanted: bool) -> None:
    if wanted:
        output.data(f"mfsdp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Root options."""


def main() -> NoReturn:
    """Run the command line; every way out is an exit code of the contract."""
    try:
        app()
    except MfsdpError as error:
        if os.environ.get("MFSDP_DEBUG") == "1":
            raise
        output.finding(error.finding)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        output.log("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing is wrong on this side.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.OK)
    except Exception as error:
        if os.environ.get("MFSDP_DEBUG") == "1":
            raise
        output.finding(
            Finding(
                "MF901",
                Severity.ERROR,
                f"internal fault: {type(error).__name__}: {error}",
                hint="run again with MFSDP_DEBUG=1 to see where it happened, and report it",
            )
        )
        sys.exit(ExitCode.INTERNAL)
    sys.exit(ExitCode.OK)
