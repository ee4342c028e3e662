"""A rank's part in a run, from joining it to the last line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.output import output
from mfsdp_cli.plan import Plan
from mfsdp_cli.runtime import checkpoint
from mfsdp_cli.runtime import topology as topology_
from mfsdp_cli.runtime.checkpoint_folder import latest
from mfsdp_cli.runtime.corpus import load_corpus
from mfsdp_cli.runtime.data import Data
from mfsdp_cli.runtime.engine import Engine, make_engine
from mfsdp_cli.runtime.job import Job
from mfsdp_cli.runtime.loop import Loop
from mfsdp_cli.runtime.progress import Progress
from mfsdp_cli.runtime.record import TRACE, RunRecord, Scalars
from mfsdp_cli.runtime.topology import Topology


class Session:
    """This rank of a run. :meth:`end` may be called from another thread at any moment."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._record: RunRecord | None = None
        output.progress_allowed = job.progress

    def run(self) -> str:
        """Train; returns the status."""
        job = self._job
        plan = _load_plan(job)
        topology = _connect(job, plan)
        if topology.rank == 0:
            self._record = RunRecord(job.run_dir, _scalars(job))
        data = _data(job, plan)
        engine = make_engine(job.engine, plan, topology, job.settings, data)
        progress = Progress(job.settings.steps, shown=topology.rank == 0)
        loop = Loop(
            engine,
            job.settings,
            plan.parallel,
            topology.device,
            self._record,
            progress,
            done=self._resume(engine),
            save=lambda step: checkpoint.save(job.run_dir, step, engine, plan.model, topology),
            save_interval=job.save_interval,
        )
        status = loop.run()
        if job.settings.trace:
            _write_trace(job.run_dir, topology, engine)
        engine.close()
        topology.barrier()
        return status

    def _resume(self, engine: Engine) -> int:
        """Load the latest checkpoint where the job says so; the steps it has behind it."""
        if not self._job.resume:
            return 0
        found = latest(self._job.run_dir)
        checkpoint.load(found, engine)
        if self._record is not None:
            self._record.resumed(found.step)
        return found.step

    def end(self, status: str, **values: Any) -> None:
        """Write the last line now, if this rank is the one that writes."""
        if self._record is not None:
            self._record.end(status, **values)


def _load_plan(job: Job) -> Plan:
    plan = Plan.load(job.plan)
    if plan.plan_digest != job.plan_digest:
        raise MfsdpError(
            "MF509",
            f"the plan {job.plan} has changed since the run was started",
            where=str(job.plan),
        )
    return plan


def _connect(job: Job, plan: Plan) -> Topology:
    device = topology_.use_device(job.backend, job.ranks_per_device)
    return topology_.connect_plan(plan, engine=job.engine, backend=job.backend, local_device=device)


def _data(job: Job, plan: Plan) -> Data:
    return Data(
        load_corpus(job.data, job.tokenizer),
        vocab_size=plan.model.vocab_size,
        seq_length=plan.parallel.seq_length,
        micro_batch_size=plan.parallel.micro_batch_size,
        global_batch_size=plan.parallel.global_batch_size,
        seed=job.settings.seed,
        eod_mask_loss=job.settings.eod_mask_loss,
    )


def _scalars(job: Job) -> Scalars | None:
    if not job.tensorboard:
        return None
    from torch.utils.tensorboard import SummaryWriter

    writer: Scalars = SummaryWriter(str(job.run_dir), flush_secs=10)
    return writer


def _write_trace(run_dir: Path, topology: Topology, engine: Engine) -> None:
    folder = run_dir / TRACE
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "rank": topology.rank,
        "pp_rank": topology.pp_rank,
        "dp_rank": topology.dp_rank,
        "persistent_bytes": engine.persistent_bytes(),
        "records": engine.trace(),
    }
    (folder / f"rank-{topology.rank}.json").write_text(json.dumps(document, allow_nan=False))
