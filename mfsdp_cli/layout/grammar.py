"""Megatron's layout strings: ``Et*3|(tt|)*29,m|L``.

========= =============================================================================
``E``     the word embedding
``t``     a decoder layer
``m``     a multi-token-prediction (MTP) layer
``L``     final norm, head and loss
``|``     the border between two stages
``x*n``   one sign n times: ``t*3`` is ``ttt``, ``|*2`` is ``||``
``(..)*n`` a group n times, borders included; counts may stand inside, groups may not
``,``     means nothing, wherever it stands
========= =============================================================================

The reading of every string that is accepted here is that of Megatron-Core's
``PipelineParallelLayerLayout`` (a test compares); what that parser would misread silently, such
as a count after a count, is refused. Positions in errors count from 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from mfsdp_cli.errors import Finding, MfsdpError
from mfsdp_cli.layout.checks import check_stages, shorten
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.layout.printer import format_layout

__all__ = ["count_stages", "examine_layout", "expand", "format_layout", "parse_layout"]

MAX_SIGNS = 100_000
"""Signs of an expanded string: room for 10,000 stages, not for ``t*999999999``."""
_LAYERS = "EtmL"
_COUNT_DIGITS = 9


def parse_layout(
    text: str, *, num_layers: int, mtp_num_layers: int, pp: int, vpp: int | None
) -> Layout:
    """Read a layout string for a model and a pipeline.

    Args:
        num_layers: decoder layers that the string must hold.
        mtp_num_layers: MTP layers that it must hold.
        pp: pipeline size; it must divide the number of stages.
        vpp: virtual stages a rank as declared elsewhere; None: what the string says.

    Raises:
        MfsdpError: the first fault, MF101 to MF119; :func:`examine_layout` gives all.
    """
    layout, faults = examine_layout(
        text, num_layers=num_layers, mtp_num_layers=mtp_num_layers, pp=pp, vpp=vpp
    )
    if layout is None:
        raise MfsdpError.of(faults[0])
    return layout


def examine_layout(
    text: str, *, num_layers: int, mtp_num_layers: int, pp: int, vpp: int | None
) -> tuple[Layout | None, list[Finding]]:
    """The layout and no finding, or None and everything that is wrong with the string."""
    try:
        stages = expand(text).split("|")
    except MfsdpError as error:
        return None, [error.finding]
    return check_stages(
        stages, text, num_layers=num_layers, mtp_num_layers=mtp_num_layers, pp=pp, vpp=vpp
    )


def count_stages(text: str) -> int:
    """How many stages a string has. Raises MF101 to MF103 where it does not parse."""
    return expand(text).count("|") + 1


def expand(text: str) -> str:
    """The string with counts, groups and commas worked out: signs of ``EtmL|`` alone.

    Raises:
        MfsdpError: MF101 a sign that is none, MF102 a count or group that is none (both naming
            the sign and its position), MF103 more than :data:`MAX_SIGNS` signs.
    """
    if not isinstance(text, str) or not text:
        raise MfsdpError("MF101", f"a layout must be a text such as 'Et*4|t*4L', got {text!r}")
    return _Parser(text).parse()


@dataclass
class _Parser:
    """Recursive descent over the string without its commas; ``positions`` leads back."""

    text: str
    signs: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    next: int = 0
    length: int = 0

    def __post_init__(self) -> None:
        for position, sign in enumerate(self.text, start=1):
            if sign != ",":
                self.signs.append(sign)
                self.positions.append(position)

    def parse(self) -> str:
        parts = []
        while self.next < len(self.signs):
            parts.append(self._group() if self._sign() == "(" else self._item())
            self.length += len(parts[-1])
            self._limit(self.length)
        return "".join(parts)

    def _group(self) -> str:
        opening = self.next
        self.next += 1
        parts = []
        while self._sign() != ")":
            if self._sign() == "":
                self._fail("MF102", "the group that opens here is not closed", at=opening)
            if self._sign() == "(":
                self._fail("MF102", "Megatron's grammar knows no group in a group, but here is one")
            parts.append(self._item())
        if not parts:
            self._fail("MF102", "the group that opens here is empty", at=opening)
        self.next += 1
        if self._sign() != "*":
            self._fail("MF102", "a group needs a count, as in (tt|)*3, but has none", at=opening)
        return self._repeat("".join(parts))

    def _item(self) -> str:
        sign = self._sign()
        if sign not in _LAYERS and sign != "|":
            self._fail_at_sign(sign)
        self.next += 1
        return self._repeat(sign) if self._sign() == "*" else sign

    def _repeat(self, part: str) -> str:
        """``part`` as often as the count that stands next says."""
        star = self.next
        self.next += 1
        digits = ""
        while self._sign() in tuple("0123456789"):
            digits += self._sign()
            self.next += 1
        if not digits:
            self._fail("MF102", "'*' must be followed by a count", at=star)
        if self._sign() == "*":
            self._fail("MF102", "a count follows a count, which Megatron misreads")
        if len(digits) > _COUNT_DIGITS:
            self._fail("MF103", f"the count {digits[:12]}... is too large", at=star)
        self._limit(int(digits) * len(part))
        return part * int(digits)

    def _sign(self) -> str:
        return self.signs[self.next] if self.next < len(self.signs) else ""

    def _limit(self, length: int) -> None:
        if length > MAX_SIGNS:
            raise MfsdpError(
                "MF103",
                f"the layout expands to {length} signs or more; at most {MAX_SIGNS} are read",
                where=f"layout {shorten(self.text)!r}",
            )

    def _fail_at_sign(self, sign: str) -> NoReturn:
        if sign == "*":
            self._fail("MF102", "'*' must follow a layer, '|' or a group")
        if sign == ")":
            self._fail("MF102", "')' closes no group")
        self._fail(
            "MF101", f"{sign!r} is no layout sign", hint="E, t, m, L, |, *count, (...)*count and ,"
        )

    def _fail(self, code: str, message: str, *, at: int | None = None, hint: str = "") -> NoReturn:
        index = self.next if at is None else at
        position = self.positions[index] if index < len(self.positions) else len(self.text) + 1
        raise MfsdpError(
            code,
            f"{message} (position {position})",
            where=f"layout {shorten(self.text)!r}, position {position}",
            hint=hint,
        )
