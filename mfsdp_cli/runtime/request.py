"""What a person asks ``mfsdp train`` for, judged before anything starts.

Imports torch only to count GPUs, after everything that can be wrong without it.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfsdp_cli.errors import ExitCode, Finding, MfsdpError, Severity
from mfsdp_cli.runtime.backend import choose_backend
from mfsdp_cli.runtime.checkpoint_folder import latest
from mfsdp_cli.runtime.engine_names import ENGINES
from mfsdp_cli.runtime.hosts import Hosts, Joined
from mfsdp_cli.runtime.job import Job
from mfsdp_cli.runtime.limits import refuse_unbuildable, refuse_unrunnable
from mfsdp_cli.runtime.record import create_run_folder, resume_run_folder
from mfsdp_cli.runtime.settings import TrainSettings

if TYPE_CHECKING:
    from mfsdp_cli.plan import Plan
    from mfsdp_cli.runtime.corpus import Corpus

PRECISIONS = ("fp32", "bf16")
BACKENDS = ("auto", "gloo", "nccl")
_PACKAGES = ("mfsdp", "torch", "megatron-core", "numpy")


@dataclass(frozen=True)
class Ready:
    """A run that may start.

    Args:
        document: what ``run.json`` says.
        plan_text: what ``plan.json`` says.
    """

    job: Job
    world_size: int
    warnings: list[Finding]
    document: dict[str, Any]
    plan_text: str
    overwrite: bool
    first_host: bool

    def create(self, mine: Joined | None = None) -> Job:
        """Make the run folder, if this process is the one that does, and check the ranks.

        Args:
            mine: this rank, where the ranks were started already.
        """
        if mine is not None and mine.world_size != self.world_size:
            raise MfsdpError(
                "MF501",
                f"the run needs {self.world_size} ranks and {mine.world_size} were started",
                hint=f"start {self.world_size} ranks",
            )
        if self.first_host if mine is None else mine.rank == 0:
            if self.job.resume:
                resume_run_folder(self.job.run_dir, self.document, self.plan_text)
            else:
                create_run_folder(self.job.run_dir, self.document, self.plan_text, self.overwrite)
        return self.job


@dataclass(frozen=True)
class TrainRequest:
    """A run as it is asked for.

    Args:
        precision, calculate_per_token_loss: None: the plan's.
        not_built: flags that are known and not supported yet, and whether each was given.
    """

    plan: Path
    engine: str
    settings: TrainSettings
    data: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    precision: str | None = None
    calculate_per_token_loss: bool | None = None
    backend: str = "auto"
    ranks_per_device: int = 1
    hosts: Hosts = field(default_factory=Hosts)
    run_dir: Path | None = None
    overwrite: bool = False
    tensorboard: bool = True
    progress: bool = True
    save_interval: int = 0
    resume: bool = False
    not_built: Mapping[str, bool] | None = None

    def prepare(self) -> Ready:
        """Check everything that can be checked here.

        Raises:
            MfsdpError: for the first thing that is wrong.
        """
        self._check_flags()
        plan = self._load_plan()
        settings = self._settings(plan)
        _one_of("--precision", settings.precision, PRECISIONS)
        world_size = 1 if self.engine == "single" else plan.parallel.world_size
        self.hosts.check(world_size)
        corpus = self._load_corpus(plan)
        local = world_size // self.hosts.nnodes
        backend = choose_backend(self.backend, local, self.ranks_per_device)
        run_dir = self.run_dir or Path("runs", f"{plan.model.name}-{self.engine}")
        job = Job(
            plan=self.plan.absolute(),
            plan_digest=plan.plan_digest,
            run_dir=run_dir.absolute(),
            engine=self.engine,
            settings=settings,
            backend=backend,
            ranks_per_device=self.ranks_per_device,
            data=self.data,
            tokenizer=self.tokenizer,
            tensorboard=self.tensorboard,
            progress=self.progress,
            save_interval=self.save_interval,
            resume=self.resume,
        )
        self._check_checkpoints(plan, run_dir)
        return Ready(
            job=job,
            world_size=world_size,
            warnings=[f for f in plan.findings if f.severity == Severity.WARNING],
            document=self._document(plan, corpus, job, world_size),
            plan_text=self.plan.read_text(),
            overwrite=self.overwrite,
            first_host=self.hosts.node_rank == 0,
        )

    def _settings(self, plan: Plan) -> TrainSettings:
        """The settings, those that were not given taken from the plan."""
        per_token = self.calculate_per_token_loss
        if per_token is None:
            per_token = plan.settings.calculate_per_token_loss
        return replace(
            self.settings,
            precision=self.precision or plan.settings.precision,
            calculate_per_token_loss=per_token,
        )

    def _check_flags(self) -> None:
        for flag, given in (self.not_built or {}).items():
            if given:
                raise MfsdpError("MF510", f"{flag} is not supported yet", where=flag)
        _one_of("--engine", self.engine, ENGINES)
        _one_of("--precision", self.precision or PRECISIONS[0], PRECISIONS)
        _one_of("--backend", self.backend, BACKENDS)
        _check_settings(self.settings)

    def _check_checkpoints(self, plan: Plan, run_dir: Path) -> None:
        """Refuse what cannot be saved or resumed, before anything starts."""
        if self.engine == "distopt" and (self.resume or self.save_interval):
            raise MfsdpError(
                "MF533",
                "engine distopt does not save or load checkpoints here",
                where="--resume" if self.resume else "--save-interval",
                hint="engines mfsdp and single do",
            )
        if not self.resume:
            return
        checkpoint = latest(run_dir)
        checkpoint.check_model(plan.model)
        if checkpoint.step >= self.settings.steps:
            raise MfsdpError(
                "MF534",
                f"{run_dir} has a checkpoint of step {checkpoint.step}: nothing is left to do up to"
                f" step {self.settings.steps}",
                where="--resume",
                hint=f"--steps above {checkpoint.step}",
            )

    def _load_plan(self) -> Plan:
        from mfsdp_cli.plan import Plan

        plan = Plan.load(self.plan)
        refuse_faulty(plan, self.plan)
        refuse_unbuildable(plan.model)
        if self.engine != "single":
            refuse_unrunnable(plan.parallel, self.engine)
        return plan

    def _load_corpus(self, plan: Plan) -> Corpus:
        from mfsdp_cli.runtime.corpus import load_corpus

        corpus = load_corpus(self.data, self.tokenizer)
        corpus.check(vocab_size=plan.model.vocab_size, seq_length=plan.parallel.seq_length)
        return corpus

    def _document(self, plan: Plan, corpus: Corpus, job: Job, world_size: int) -> dict[str, Any]:
        return {
            "plan_digest": plan.plan_digest,
            "schedule_digest": plan.schedule.digest,
            "engine": self.engine,
            "backend": job.backend,
            "precision": job.settings.precision,
            "seed": job.settings.seed,
            "world_size": world_size,
            "global_batch_size": plan.parallel.global_batch_size,
            "seq_length": plan.parallel.seq_length,
            "settings": job.settings.to_json(),
            "versions": _versions(),
            "data": corpus.source,
            "data_digest": corpus.digest,
        }


def refuse_faulty(plan: Plan, path: Path) -> None:
    """Raise MF509 for a plan with findings of severity error, or with another schedule.

    The schedule is rebuilt from the plan; its digest must be the one that was written.
    """
    if errors := plan.errors:
        raise MfsdpError(
            "MF509",
            f"the plan has {len(errors)} finding(s) of severity error, first"
            f" {errors[0].code}: {errors[0].message}",
            where=str(path),
            hint=f"see `mfsdp validate {path}`",
            exit_code=ExitCode.PROBLEM,
        )
    written = plan.document["schedule"]["digest"]
    if written != plan.schedule.digest:
        raise MfsdpError(
            "MF509",
            f"the plan's schedule digest {written} is not that of the schedule it describes,"
            f" {plan.schedule.digest}",
            where=str(path),
            hint="make the plan again with `mfsdp plan`",
            exit_code=ExitCode.PROBLEM,
        )


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise MfsdpError(
            "MF902", f"unknown value {value!r}", where=flag, hint=f"one of {', '.join(allowed)}"
        )


def _check_settings(settings: TrainSettings) -> None:
    rules = (
        ("--lr", settings.lr, settings.lr >= 0, "0 or more"),
        ("--weight-decay", settings.weight_decay, settings.weight_decay >= 0, "0 or more"),
        ("--clip-grad", settings.clip_grad, settings.clip_grad >= 0, "0 or more"),
        ("--adam-beta1", settings.adam_beta1, 0 <= settings.adam_beta1 < 1, "in [0, 1)"),
        ("--adam-beta2", settings.adam_beta2, 0 <= settings.adam_beta2 < 1, "in [0, 1)"),
        ("--adam-eps", settings.adam_eps, settings.adam_eps > 0, "above 0"),
        ("--seed", settings.seed, settings.seed < 2**63, "below 2^63"),
    )
    for flag, value, holds, wanted in rules:
        if not holds or not math.isfinite(value):
            raise MfsdpError("MF902", f"{value} is not a finite number {wanted}", where=flag)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found
