"""What a list of stages must satisfy for a model and a pipeline, and what is odd about it.

Where a rule is stricter than Megatron-Core's own parser, that is said beside it: there Megatron
builds something that cannot train, or not what was meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mfsdp_cli.errors import Finding, Severity
from mfsdp_cli.layout.layout import Layout, StageLayout
from mfsdp_cli.model.spec import ModelSpec


def check_stages(
    stages: Sequence[str],
    text: str,
    *,
    num_layers: int,
    mtp_num_layers: int,
    pp: int,
    vpp: int | None,
) -> tuple[Layout | None, list[Finding]]:
    """The layout of expanded stages such as ``["Ett", "tt", "", "L"]``, or all that is wrong.

    Args:
        text: the string as written, for messages.
    """
    if pp < 1:
        message = f"pipeline sizes start at 1, got {pp}"
        return None, [Finding("MF116", Severity.ERROR, message, where=f"layout {shorten(text)!r}")]
    check = _Check(stages, text, pp, vpp)
    faults = [
        *check.pipeline(),
        *check.decoder(num_layers),
        *check.embedding(),
        *check.loss(),
        *check.mtp(mtp_num_layers),
        *check.order(),
    ]
    return (None, faults) if faults else (build_layout(stages, pp), [])


def build_layout(stages: Sequence[str], pp: int) -> Layout:
    """The layout of stages that are known to be right."""
    layer = depth = 0
    built = []
    for stage, content in enumerate(stages):
        decoder, mtp = content.count("t"), content.count("m")
        built.append(
            StageLayout(
                stage,
                pp_rank=stage % pp,
                vp_stage=stage // pp,
                layers=tuple(range(layer, layer + decoder)),
                embedding="E" in content,
                loss="L" in content,
                mtp=tuple(range(depth, depth + mtp)),
            )
        )
        layer, depth = layer + decoder, depth + mtp
    return Layout(pp, len(stages) // pp, tuple(built))


def layout_findings(spec: ModelSpec, layout: Layout) -> list[Finding]:
    """Warnings and notes on a layout that is valid: MF120 a rank without parameters, MF121 an
    empty stage on a rank that has some.
    """
    findings = []
    for pp_rank in range(layout.pp):
        stages = layout.stages_of(pp_rank)
        empty = [stage for stage in stages if is_empty(stage)]
        if len(empty) == len(stages):
            findings.append(_idle_rank(spec, layout, pp_rank))
        elif empty:
            findings.append(_empty_stages(layout, pp_rank, empty))
    return findings


def is_empty(stage: StageLayout) -> bool:
    """Whether a stage holds nothing at all: it passes activations on."""
    return not (stage.layers or stage.embedding or stage.loss or stage.mtp)


def shorten(text: str, limit: int = 120) -> str:
    """A long text cut for a message."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def _idle_rank(spec: ModelSpec, layout: Layout, pp_rank: int) -> Finding:
    return Finding(
        "MF120",
        Severity.WARNING,
        f"pipeline rank {pp_rank} of {layout.pp} holds no parameters: it only passes "
        "activations on and joins the reductions of the gradient norm",
        where=f"pp_rank {pp_rank}, model {spec.name}",
        hint=f"give it decoder layers, or plan with {layout.pp - 1} pipeline ranks",
    )


def _empty_stages(layout: Layout, pp_rank: int, empty: Sequence[StageLayout]) -> Finding:
    names = ", ".join(str(stage.stage) for stage in empty)
    return Finding(
        "MF121",
        Severity.NOTE,
        f"{len(empty)} of the {layout.vpp} stages of pipeline rank {pp_rank} hold nothing and "
        "only pass activations on",
        where=f"stage {names}, pp_rank {pp_rank}",
    )


@dataclass(frozen=True)
class _Check:
    stages: Sequence[str]
    text: str
    pp: int
    vpp: int | None

    def pipeline(self) -> Iterator[Finding]:
        number = len(self.stages)
        if number % self.pp:
            yield self._fault(
                "MF105",
                f"the layout has {number} stages, which do not divide over "
                f"{self.pp} pipeline ranks",
                hint=f"pipeline sizes that divide {number}: {_divisors(number)}",
            )
            return
        found = number // self.pp
        if self.vpp is not None and self.vpp != found:
            yield self._fault(
                "MF106",
                f"{self.vpp} virtual stages a rank are declared, but the layout's {number} "
                f"stages on {self.pp} ranks make {found}",
                hint=f"declare {found}, or leave the declaration out",
            )
        if self.pp == 1 and found > 1:
            yield self._fault(
                "MF116", f"one pipeline rank cannot interleave: the layout has {number} stages"
            )

    def decoder(self, num_layers: int) -> Iterator[Finding]:
        found = self._count("t")
        if found != num_layers:
            yield self._fault(
                "MF107",
                f"the layout holds {found} decoder layers (t), the model has {num_layers}",
                hint=_difference(num_layers - found),
            )

    def embedding(self) -> Iterator[Finding]:
        found = self._count("E")
        if found != 1:
            yield self._fault("MF108", f"the embedding (E) must stand once, found {found}")
        elif not self.stages[0].startswith("E"):
            where = self._place(self._first("E"))
            yield self._fault(
                "MF108", f"the embedding (E) must come first on stage 0, but is on {where}"
            )

    def loss(self) -> Iterator[Finding]:
        """Stricter than Megatron, which lets empty stages follow the loss: they would wait for
        an output that nobody sends.
        """
        found, last = self._count("L"), len(self.stages) - 1
        if found != 1:
            yield self._fault("MF109", f"the loss (L) must stand once, found {found}")
        elif not self.stages[-1].endswith("L"):
            content = self.stages[-1]
            held = f"holds {content!r}" if content else "is empty"
            yield self._fault(
                "MF109",
                f"the loss (L) must come last on the last stage, {self._place(last)}, but is on "
                f"{self._place(self._first('L'))}; the last stage {held}",
                hint="end the layout with L, without a border after it",
            )

    def mtp(self, mtp_num_layers: int) -> Iterator[Finding]:
        """Stricter than Megatron on pipeline rank 0, where its own message says what its check
        leaves out.
        """
        found = self._count("m")
        if found != mtp_num_layers:
            yield self._fault(
                "MF110",
                f"the layout holds {found} MTP layers (m), the model has {mtp_num_layers}",
            )
        places = [stage for stage, content in enumerate(self.stages) if "m" in content]
        if len(places) > 1:
            names = ", ".join(map(self._place, places))
            yield self._fault("MF111", f"all MTP layers (m) must be on one stage, not on {names}")
        yield from self._mtp_place(places)

    def _mtp_place(self, places: Sequence[int]) -> Iterator[Finding]:
        if not places or len(self.stages) % self.pp:
            return
        stage = places[-1]
        if stage < len(self.stages) - self.pp:
            yield self._fault(
                "MF111",
                f"MTP layers (m) must be in the last virtual stage of their rank, but are on "
                f"{self._place(stage)}",
            )
        elif stage % self.pp == 0 and self.pp > 1:
            yield self._fault(
                "MF111",
                f"MTP layers (m) must not be on pipeline rank 0, as on {self._place(stage)}",
            )

    def order(self) -> Iterator[Finding]:
        signs = "".join(self.stages)
        if "m" in signs and "t" in signs[signs.index("m") :]:
            first = self._first("m")
            yield self._fault(
                "MF111",
                f"decoder layers (t) must come before MTP layers (m), but some follow the MTP on "
                f"{self._place(first)}",
            )

    def _count(self, sign: str) -> int:
        return sum(content.count(sign) for content in self.stages)

    def _first(self, sign: str) -> int:
        return next(stage for stage, content in enumerate(self.stages) if sign in content)

    def _place(self, stage: int) -> str:
        if len(self.stages) % self.pp:
            return f"stage {stage}"
        return f"stage {stage} (pp rank {stage % self.pp}, virtual stage {stage // self.pp})"

    def _fault(self, code: str, message: str, *, hint: str = "") -> Finding:
        where = f"layout {shorten(self.text)!r}, pipeline size {self.pp}"
        return Finding(code, Severity.ERROR, message, hint, where)


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _difference(missing: int) -> str:
    layers = "layer" if abs(missing) == 1 else "layers"
    return f"{abs(missing)} {layers} {'missing' if missing > 0 else 'too many'}"
