"""Schedule actions and their text form.

The text is the grammar of ``torch.distributed.pipelining``: ``2F0`` is stage 2, forward,
microbatch 0; ``2UNSHARD`` has no microbatch. Actions at the end of the step belong to the rank
as a whole and have neither: ``GRAD_NORM``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from mfsdp_cli.errors import MfsdpError


class Kind(StrEnum):
    """What an action does. The value is its text form."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    ROUTER_BIAS = "ROUTER_BIAS"
    TIED_ALLREDUCE = "TIED_ALLREDUCE"
    GRAD_NORM = "GRAD_NORM"
    CLIP = "CLIP"
    OPTIMIZER = "OPTIMIZER"
    REFRESH_WEIGHTS = "REFRESH_WEIGHTS"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
PER_MICROBATCH = COMPUTE | SENDS | RECEIVES
PER_STAGE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})
END_OF_STEP = frozenset(
    {
        Kind.ROUTER_BIAS,
        Kind.TIED_ALLREDUCE,
        Kind.GRAD_NORM,
        Kind.CLIP,
        Kind.OPTIMIZER,
        Kind.REFRESH_WEIGHTS,
    }
)

# Longest names first, so that `1SEND_F0` is not read as stage 1, kind `S`.
_NAMES = "|".join(sorted((str(kind) for kind in Kind), key=len, reverse=True))
# Nine digits are more than any schedule needs, and keep numbers within every integer type.
_ACTION = re.compile(rf"([0-9]{{1,9}})?({_NAMES})([0-9]{{1,9}})?")

# Characters of a text that an error repeats.
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank.

    ``stage`` is None for actions at the end of the step; ``microbatch`` is None for them and for
    actions on a whole stage.
    """

    kind: Kind
    stage: int | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        stage = "" if self.stage is None else self.stage
        microbatch = "" if self.microbatch is None else self.microbatch
        return f"{stage}{self.kind}{microbatch}"


def parse_action(text: str) -> Action:
    """Read one action; blanks around it are allowed. Raises MF301 with what is expected."""
    match = _ACTION.fullmatch(text.strip())
    shown = repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
    if match is None:
        raise MfsdpError(
            "MF301",
            f"not a schedule action: {shown}",
            hint="write stage, kind and microbatch, such as 2F0, 2B0, 2UNSHARD or GRAD_NORM",
        )
    kind = Kind(match[2])
    stage = None if match[1] is None else int(match[1])
    microbatch = None if match[3] is None else int(match[3])
    needs_stage = kind not in END_OF_STEP
    # torch prints the whole-stage REDUCE_GRAD with an optional microbatch; accept only without.
    needs_microbatch = kind in PER_MICROBATCH
    if needs_stage != (stage is not None) or needs_microbatch != (microbatch is not None):
        wanted = ("a stage" if needs_stage else "no stage") + (
            " and a microbatch" if needs_microbatch else " and no microbatch"
        )
        raise MfsdpError("MF301", f"not a schedule action: {shown}: {kind} takes {wanted}")
    return Action(kind, stage, microbatch)
