"""``mfsdp train``: execute exactly a plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mfsdp_cli.errors import ExitCode
from mfsdp_cli.output import output

if TYPE_CHECKING:
    from mfsdp_cli.runtime.report import Report
    from mfsdp_cli.runtime.request import TrainRequest

_RUN = "The run"
_OPTIMIZER = "AdamW (learning rate constant after warm-up)"
_DATA = "Data"
_WHERE = "Where it runs"
_RECORD = "What it leaves"


def train(
    plan: Annotated[Path, typer.Argument(help="A plan that `mfsdp plan --out` wrote.")],
    engine: Annotated[
        str,
        typer.Option(
            help="mfsdp; distopt (Megatron-Core's own); single (one rank, unsharded reference).",
            rich_help_panel=_RUN,
        ),
    ] = "mfsdp",
    steps: Annotated[
        int,
        typer.Option(
            "--steps", "--train-iters", min=1, help="Optimizer steps.", rich_help_panel=_RUN
        ),
    ] = 100,
    eval_interval: Annotated[
        int, typer.Option(min=0, help="Steps between evaluations; 0: never.", rich_help_panel=_RUN)
    ] = 0,
    eval_steps: Annotated[
        int,
        typer.Option(
            "--eval-steps",
            "--eval-iters",
            min=1,
            help="Global batches of an evaluation.",
            rich_help_panel=_RUN,
        ),
    ] = 8,
    seed: Annotated[
        int, typer.Option(min=0, help="Weights and order of samples.", rich_help_panel=_RUN)
    ] = 1234,
    lr: Annotated[
        float, typer.Option(help="Learning rate after warm-up.", rich_help_panel=_OPTIMIZER)
    ] = 1e-3,
    lr_warmup_steps: Annotated[
        int,
        typer.Option(
            "--lr-warmup-steps",
            "--lr-warmup-iters",
            min=0,
            help="Steps of linear warm-up; 0: none.",
            rich_help_panel=_OPTIMIZER,
        ),
    ] = 10,
    weight_decay: Annotated[
        float,
        typer.Option(help="Not on biases and one dimension.", rich_help_panel=_OPTIMIZER),
    ] = 0.01,
    clip_grad: Annotated[
        float,
        typer.Option(
            help="Largest norm of the gradient; 0: no clipping.", rich_help_panel=_OPTIMIZER
        ),
    ] = 1.0,
    adam_beta1: Annotated[float, typer.Option(rich_help_panel=_OPTIMIZER)] = 0.9,
    adam_beta2: Annotated[float, typer.Option(rich_help_panel=_OPTIMIZER)] = 0.95,
    adam_eps: Annotated[float, typer.Option(rich_help_panel=_OPTIMIZER)] = 1e-8,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text files or folders (repeatable), or a Megatron .bin/.idx prefix. Default: the"
            " Python standard library's source.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="bytes: one token a byte.", rich_help_panel=_DATA)
    ] = "bytes",
    eod_mask_loss: Annotated[
        bool,
        typer.Option(
            "--eod-mask-loss",
            help="Leave the last position of each document (a file, or a document of a Megatron"
            " pair) out of the loss: what follows is another document.",
            rich_help_panel=_DATA,
        ),
    ] = False,
    calculate_per_token_loss: Annotated[
        bool | None,
        typer.Option(
            "--calculate-per-token-loss/--no-calculate-per-token-loss",
            help="Mean over the valid tokens of the global batch, not over microbatches. Default:"
            " the plan's.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="fp32, bf16. Default: the plan's.", rich_help_panel=_RUN),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(help="auto, gloo (CPU), nccl (one GPU a rank).", rich_help_panel=_WHERE),
    ] = "auto",
    ranks_per_device: Annotated[
        int, typer.Option(min=1, help="Ranks that share one GPU.", rich_help_panel=_WHERE)
    ] = 1,
    nnodes: Annotated[int, typer.Option(help="Hosts.", rich_help_panel=_WHERE)] = 1,
    node_rank: Annotated[int, typer.Option(help="This host's number.", rich_help_panel=_WHERE)] = 0,
    rdzv_endpoint: Annotated[
        str, typer.Option(help="HOST:PORT where the hosts meet.", rich_help_panel=_WHERE)
    ] = "",
    run_dir: Annotated[
        Path | None, typer.Option(help="Default: runs/MODEL-ENGINE.", rich_help_panel=_RECORD)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run folder.", rich_help_panel=_RECORD)
    ] = False,
    save_interval: Annotated[
        int,
        typer.Option(min=0, help="Steps between checkpoints; 0: none.", rich_help_panel=_RECORD),
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the run folder's last checkpoint.", rich_help_panel=_RECORD
        ),
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Record what is executed.", rich_help_panel=_RECORD)
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option(help="TensorBoard events in the run folder.", rich_help_panel=_RECORD)
    ] = True,
    wandb: Annotated[
        bool,
        typer.Option(
            "--wandb", help="Log to Weights & Biases; not available yet.", rich_help_panel=_RECORD
        ),
    ] = False,
    no_progress: Annotated[
        bool, typer.Option("--no-progress", help="No bar on a terminal.", rich_help_panel=_RECORD)
    ] = False,
) -> None:
    """Train as a plan says, and leave a run folder to compare."""
    from mfsdp_cli.runtime.hosts import Hosts
    from mfsdp_cli.runtime.request import TrainRequest
    from mfsdp_cli.runtime.settings import TrainSettings

    settings = TrainSettings(
        steps=steps,
        eval_interval=eval_interval,
        eval_steps=eval_steps,
        seed=seed,
        lr=lr,
        lr_warmup_steps=lr_warmup_steps,
        weight_decay=weight_decay,
        clip_grad=clip_grad,
        adam_beta1=adam_beta1,
        adam_beta2=adam_beta2,
        adam_eps=adam_eps,
        eod_mask_loss=eod_mask_loss,
        trace=trace,
    )
    request = TrainRequest(
        plan=plan,
        engine=engine,
        settings=settings,
        data=tuple(data or ()),
        tokenizer=tokenizer,
        precision=precision,
        calculate_per_token_loss=calculate_per_token_loss,
        backend=backend,
        ranks_per_device=ranks_per_device,
        hosts=Hosts(nnodes, node_rank, rdzv_endpoint),
        run_dir=run_dir,
        overwrite=overwrite,
        tensorboard=tensorboard,
        progress=not no_progress,
        save_interval=save_interval,
        resume=resume,
        not_built={
            "--wandb": wandb,
        },
    )
    raise typer.Exit(_run(request))


def _run(request: TrainRequest) -> int:
    from mfsdp_cli.runtime import launch
    from mfsdp_cli.runtime.backend import rehearsal_note
    from mfsdp_cli.runtime.hosts import joined

    mine = joined(os.environ)
    ready = request.prepare()
    output.findings(ready.warnings)
    if note := rehearsal_note(ready.job.backend, ready.job.ranks_per_device):
        output.log(note)
    if mine is not None:
        status = launch.join(ready.create(mine))
        if mine.rank == 0:
            _show_end(ready.job.run_dir, status)
        return ExitCode.OK if status == launch.COMPLETED else ExitCode.PROBLEM
    outcome = launch.launch(ready.create(), ready.world_size, request.hosts)
    if output.interactive():
        output.console(err=True).show_cursor(True)  # rank 0 may have left in mid-bar
    if outcome.failure is not None:
        _show_failure(outcome.failure, outcome.others)
    if request.hosts.node_rank == 0:
        _show_end(ready.job.run_dir, outcome.status)
    return outcome.exit_code


def _show_end(run_dir: Path, status: str) -> None:
    from mfsdp_cli.runtime import launch

    output.log(launch.summary(run_dir, status))
    if status == launch.NAN:
        output.finding(launch.not_finite(run_dir))


def _show_failure(failure: Report, others: int) -> None:
    from mfsdp_cli.runtime.report import finding_of

    if os.environ.get("MFSDP_DEBUG") == "1" and failure.traceback:
        output.log(failure.traceback)
    output.finding(finding_of(failure, others))
