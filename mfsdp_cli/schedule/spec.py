"""What a schedule is made from: sizes and choices, checked when the object is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from mfsdp_cli.errors import Finding, MfsdpError, Severity

SUPPORTED = ("1f1b", "interleaved-1f1b")
PLANNED = ("zb-h1", "zb-v", "combined-1f1b")
REDUCTIONS = ("microbatch", "last")

# Compute actions of one schedule; beyond it lists of Python objects take several gigabytes.
MAX_COMPUTE_ACTIONS = 8_000_000


@dataclass(frozen=True)
class ScheduleSpec:
    """Everything a schedule depends on; equal specs give equal schedules.

    Args:
        name: ``1f1b`` (one stage a rank) or ``interleaved-1f1b`` (``vpp`` stages a rank).
        pp: pipeline ranks.
        vpp: stages (chunks) a rank; 1 where the schedule is not interleaved.
        num_microbatches: microbatches a step and data-parallel rank.
        group_size: consecutive microbatches a chunk runs before the next chunk gets its turn
            (interleaved only); Megatron's default is ``pp``.
        resident_chunks: how many chunks a rank keeps gathered; 0 gathers for every use.
        gradient_reduction: ``microbatch`` reduces after every backward of a stage, ``last`` after
            its last backward only.
        tied_pp_ranks: pipeline ranks of each shared-parameter group.
        router_bias: whether the model updates MoE router biases at the end of the step.

    Raises:
        MfsdpError: MF302 unknown schedule, MF303 schedule and ``vpp`` contradict each other,
            MF305 a size out of range.
    """

    name: str
    pp: int
    vpp: int
    num_microbatches: int
    group_size: int
    resident_chunks: int = 1
    gradient_reduction: str = "microbatch"
    tied_pp_ranks: tuple[tuple[int, ...], ...] = ()
    router_bias: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", canonical_name(self.name))
        for field, least in _LEAST.items():
            _check_integer(field, getattr(self, field), least)
        _check_chunks(self.name, self.vpp)
        if self.gradient_reduction not in REDUCTIONS:
            raise MfsdpError(
                "MF305",
                f"gradient_reduction is {self.gradient_reduction!r}; "
                f"it is one of {', '.join(REDUCTIONS)}",
            )
        self._check_tied_ranks()
        compute = 2 * self.num_stages * self.num_microbatches
        if compute > MAX_COMPUTE_ACTIONS:
            raise MfsdpError(
                "MF305",
                f"{self.num_stages} stages x {self.num_microbatches} microbatches make {compute} "
                f"forwards and backwards; a schedule holds at most {MAX_COMPUTE_ACTIONS}",
                hint="fewer microbatches: a larger micro batch or data-parallel size",
            )

    def _check_tied_ranks(self) -> None:
        for ranks in self.tied_pp_ranks:
            for rank in ranks:
                _check_integer("tied_pp_ranks", rank, 0)
            if not ranks or len(set(ranks)) < len(ranks) or max(ranks) >= self.pp:
                raise MfsdpError(
                    "MF305",
                    f"a shared-parameter group names pipeline ranks {list(ranks)}; each must be "
                    f"one of 0..{self.pp - 1} and stand once",
                )

    @property
    def num_stages(self) -> int:
        """Global virtual stages."""
        return self.pp * self.vpp

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage: ``stage = vp_stage * pp + pp_rank``."""
        return stage % self.pp

    def to_json(self) -> dict[str, Any]:
        """Plain lists, strings and numbers; :meth:`from_json` reads them back."""
        document = asdict(self)
        document["tied_pp_ranks"] = [list(ranks) for ranks in self.tied_pp_ranks]
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> ScheduleSpec:
        """The spec that :meth:`to_json` wrote. Raises MF305 where a key is missing or malformed."""
        try:
            values = {field.name: document[field.name] for field in fields(cls)}
            values["tied_pp_ranks"] = tuple(tuple(ranks) for ranks in values["tied_pp_ranks"])
        except (KeyError, TypeError) as error:
            raise MfsdpError("MF305", f"not a schedule specification: {error!r}") from error
        return cls(**values)


_LEAST = {"pp": 1, "vpp": 1, "num_microbatches": 1, "group_size": 1, "resident_chunks": 0}


def default_name(vpp: int) -> str:
    """The schedule for a number of chunks a rank: interleaved exactly where there are several."""
    return "interleaved-1f1b" if vpp > 1 else "1f1b"


def canonical_name(text: str) -> str:
    """The schedule that a text names, in any case; MF302 unless it can be built."""
    name = str(text).strip().lower().replace("_", "-")
    if name in SUPPORTED:
        return name
    valid = ", ".join(SUPPORTED)
    if name in PLANNED:
        raise MfsdpError(
            "MF302",
            f"schedule {name} is not supported yet; supported are {valid}",
            where="--schedule",
            hint="leave --schedule out: the number of virtual stages decides",
        )
    raise MfsdpError(
        "MF302", f"unknown schedule {text!r}; valid names are {valid}", where="--schedule"
    )


def check_name(text: str) -> None:
    """Raise MF302 unless the text names a schedule that can be built."""
    canonical_name(text)


def microbatch_findings(spec: ScheduleSpec, *, origin: str = "") -> list[Finding]:
    """What Megatron says about a microbatch count, as findings.

    Errors: counts Megatron's interleaved schedule refuses. Warning: fewer microbatches than
    pipeline ranks under 1F1B, which runs but idles.

    Args:
        origin: how the count came about, such as ``global batch 3 / (micro batch 1 x
            data-parallel size 1)``; appended to the message.
    """
    count = f"{spec.num_microbatches} microbatches" + (f" ({origin})" if origin else "")
    if spec.name == "1f1b":
        return _few_microbatches(spec, count)
    found = [_interleaved_problem(spec, count)]
    return [finding for finding in found if finding is not None]


def _few_microbatches(spec: ScheduleSpec, count: str) -> list[Finding]:
    pp, microbatches = spec.pp, spec.num_microbatches
    if microbatches >= pp:
        return []
    bubble = (pp - 1) / (microbatches + pp - 1)
    return [
        Finding(
            "MF304",
            Severity.WARNING,
            f"{count} do not fill {pp} pipeline ranks: the bubble is {bubble:.1%} of the step",
            hint=f"at least {pp} microbatches: a larger global batch or a smaller micro batch",
            where="--global-batch-size",
        )
    ]


def _interleaved_problem(spec: ScheduleSpec, count: str) -> Finding | None:
    pp, microbatches, group = spec.pp, spec.num_microbatches, spec.group_size
    if microbatches < pp:
        return _error(
            f"{count} are too few for the interleaved schedule on {pp} pipeline ranks: "
            f"at least {pp} are needed",
            "--global-batch-size",
            f"a global batch that gives at least {pp} microbatches, or no virtual stages",
        )
    if not pp <= group <= microbatches:
        return _error(
            f"the microbatch group size of the interleaved schedule is {group}; it must lie "
            f"between the {pp} pipeline ranks and the {count}",
            "--microbatch-group-size-per-virtual-pipeline-stage",
            f"a group size from {pp} to {microbatches} (default: {pp})",
        )
    remainder = microbatches % group
    if 0 < remainder < pp:
        return _error(
            f"{count} in groups of {group} leave a last group of {remainder}; it must be full "
            f"or hold at least as many as there are pipeline ranks, {pp}",
            "--global-batch-size",
            f"{microbatches - remainder} or {microbatches + group - remainder} microbatches, "
            "or another group size",
        )
    return None


def _error(message: str, where: str, hint: str) -> Finding:
    return Finding("MF304", Severity.ERROR, message, hint=hint, where=where)


def _check_integer(field: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MfsdpError("MF305", f"{field} must be an integer of at least {least}, got {value!r}")


def _check_chunks(name: str, vpp: int) -> None:
    if name == "1f1b" and vpp > 1:
        raise MfsdpError(
            "MF303",
            f"schedule 1f1b runs one stage a rank, but there are {vpp} virtual stages a rank",
            where="--schedule 1f1b",
            hint="--schedule interleaved-1f1b, or --vpp 1",
        )
    if name == "interleaved-1f1b" and vpp == 1:
        raise MfsdpError(
            "MF303",
            "schedule interleaved-1f1b needs at least 2 virtual stages a rank, but there is 1",
            where="--schedule interleaved-1f1b",
            hint="--schedule 1f1b, or --vpp 2",
        )
