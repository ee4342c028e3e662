"""The ``mfsdp`` application: commands, and errors turned into messages and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import typer

from mfsdp_cli import __version__
from mfsdp_cli.commands.compare_runs import compare_runs
from mfsdp_cli.commands.plan import plan
from mfsdp_cli.commands.train import train
from mfsdp_cli.commands.validate import validate
from mfsdp_cli.errors import ExitCode, Finding, MfsdpError, Severity
from mfsdp_cli.output import output
from mfsdp_cli.streams import guard_streams

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
    guard_streams()
    try:
        code = _exit_code()
        sys.stdout.flush()
    except MfsdpError as error:
        _show_traceback()
        output.finding(error.finding)
        code = error.exit_code
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except Exception as error:
        _show_traceback()
        output.finding(_internal_fault(error))
        code = ExitCode.INTERNAL
    sys.exit(code)


def _exit_code() -> int:
    """Run the application; it leaves by SystemExit, however it ends."""
    try:
        app()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else ExitCode.OK
    return ExitCode.OK


def _show_traceback() -> None:
    """Where the error being handled came from, for whoever asks with ``MFSDP_DEBUG=1``."""
    if os.environ.get("MFSDP_DEBUG") == "1":
        output.log(traceback.format_exc())


def _internal_fault(error: Exception) -> Finding:
    return Finding(
        "MF901",
        Severity.ERROR,
        f"internal fault: {type(error).__name__}: {error}",
        hint="run again with MFSDP_DEBUG=1 to see where it happened, and report it",
    )
