"""What readers feed: named values by step. At the end it says which of them are the two losses."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from mfsdp_cli.compare.names import (
    BATCH_SIZES,
    SAMPLES,
    TOKENS,
    Choice,
    Role,
    alias,
    choose,
    normal,
    role,
    same_name,
)
from mfsdp_cli.compare.run import Run
from mfsdp_cli.compare.series import Series, SeriesBuilder
from mfsdp_cli.compare.values import step_number
from mfsdp_cli.errors import MfsdpError

#: Series kept, and names listed in an error, at most: a row may hold thousands of values.
_MAX_SERIES, _MAX_NAMES = 64, 2000


class Collector:
    """Gathers one run while its reader streams.

    Args:
        path: of the run, for messages.
        metric: the metric asked for; None for the training and the evaluation loss.
    """

    def __init__(self, path: str, metric: str | None = None) -> None:
        self.run = Run(path, "")
        self.metric = metric
        self.names: dict[str, None] = {}  # in the order seen
        self._series: dict[str, SeriesBuilder] = {}
        self._born: dict[str, int] = {}  # training records before a series' first point
        self._expected_steps = array("q")
        self._expected_kinds = bytearray()
        self._batch_sizes: set[int] = set()

    def add(self, name: str, step: int, value: float | None) -> None:
        """One value of one name; None where the logger wrote no number in its place."""
        if len(self.names) < _MAX_NAMES:
            self.names.setdefault(name)
        if not self._wanted(name):
            return
        series = self._series.get(name) or self._new_series(name)
        if value is None:
            series.add_gap(step)
        else:
            series.add(step, value)

    def _new_series(self, name: str) -> SeriesBuilder:
        series = SeriesBuilder()
        if len(self._series) < _MAX_SERIES:
            self._series[name] = series
            self._born[name] = len(self._expected_steps)
        return series

    def row(self, step: int, values: Mapping[str, float | None], *, gap: int | None = None) -> None:
        """Values that came together.

        Args:
            step: of all of them.
            values: by name; None where no number stood in a value's place.
            gap: ``GAP`` for a training record (one that has a loss unless the loss is missing),
                ``UNSURE_GAP`` for one that probably is, None for any other row.
        """
        for name, value in values.items():
            self.add(name, step, value)
        if gap is None:
            return
        self._expected_steps.append(step)
        self._expected_kinds.append(gap)
        for name, series in self._series.items():
            if name not in values and role(name) is Role.TRAIN:
                series.add_gap(step, gap)

    def place(self, step: int, name: str, value: object) -> bool:
        """Note samples, tokens or batch size if that is what ``name`` means; whether it was."""
        plain = normal(name)
        if plain not in SAMPLES and plain not in TOKENS and plain not in BATCH_SIZES:
            return False
        total = step_number(value)
        if total is not None and total > 0:
            if plain in BATCH_SIZES:
                self._batch_sizes.add(total)
            else:
                (self.run.samples if plain in SAMPLES else self.run.tokens).add(step, total)
        return True

    def _wanted(self, name: str) -> bool:
        if role(name) is not Role.OTHER:
            return True
        return self.metric is not None and normal(name) == normal(self.metric)

    def finish(self, format_name: str, *, may_be_empty: bool = False) -> Run:
        """The run, with the series that were asked for.

        Args:
            format_name: as in the JSON document.
            may_be_empty: whether a run without any loss is one nevertheless.

        Raises:
            MfsdpError: MF603 if the metric, or any loss, is not there, MF604 if several losses
                could be meant.
        """
        run = self.run
        run.format = format_name
        if self.metric is None:
            self._take_losses(may_be_empty)
        elif self.names or not may_be_empty:
            self._take_metric(self.metric)
        self._settle_batch()
        self._note_series()
        return run

    def _take_losses(self, may_be_empty: bool) -> None:
        run = self.run
        train, evaluation = choose(self._series, Role.TRAIN), choose(self._series, Role.EVAL)
        self._refuse_rivals(evaluation, "evaluation losses")
        if evaluation.name is None:
            self._refuse_rivals(train, "training losses")
        if train.name is None and not train.rivals and self._expected_steps:
            train = Choice("loss")  # a run whose every training record lacks the loss
        if not (train.name or evaluation.name or may_be_empty):
            raise self._no_metric("no loss recognized")
        run.train_name, run.eval_name = train.name, evaluation.name
        run.train, run.eval = self._built(train.name), self._built(evaluation.name)
        if train.rivals:
            run.notes.append(f"several training losses, none taken: {', '.join(train.rivals)}")

    def _refuse_rivals(self, choice: Choice, what: str) -> None:
        if choice.rivals:
            raise MfsdpError(
                "MF604",
                f"several {what} could be meant: {', '.join(sorted(choice.rivals))}",
                where=self.run.path,
                hint="say which with --metric NAME",
            )

    def _take_metric(self, metric: str) -> None:
        name = same_name(metric, self.names)
        if name is None and (meant := alias(metric)):
            name = choose(self._series, meant).name
        if name is None:
            raise self._no_metric(f"no metric {metric!r}")
        if role(name) is Role.EVAL:
            self.run.eval, self.run.eval_name = self._built(name), name
        else:
            self.run.train, self.run.train_name = self._built(name), name

    def _no_metric(self, what: str) -> MfsdpError:
        return MfsdpError(
            "MF603",
            f"{what} in this run; it has {self._listed_names()}",
            where=self.run.path,
            hint="choose one of the names that the run has with --metric NAME",
        )

    def _listed_names(self) -> str:
        shown = [repr(name) for name in sorted(self.names)]
        left = f" and {len(shown) - 40} more" if len(shown) > 40 else ""
        return (", ".join(shown[:40]) or "none") + left

    def _built(self, name: str | None) -> Series:
        if name is None:
            return Series()
        builder = self._series.get(name, SeriesBuilder())
        if role(name) is Role.TRAIN:
            builder = self._with_early_gaps(name, builder)
        return builder.finish()

    def _with_early_gaps(self, name: str, builder: SeriesBuilder) -> SeriesBuilder:
        """Put training records from before the first loss in front, as gaps."""
        early = self._born.get(name, len(self._expected_steps))
        if not early:
            return builder
        whole = SeriesBuilder()
        for step, kind in zip(self._expected_steps[:early], self._expected_kinds, strict=False):
            whole.add_gap(step, kind)
        whole.extend(builder)
        return whole

    def _settle_batch(self) -> None:
        run = self.run
        for progress in (run.samples, run.tokens):
            growths = progress.growths()
            if growths:
                progress.growth = min(growths) if len(growths) == 1 else None
        run.batch_sizes = tuple(sorted(self._batch_sizes or run.samples.growths()))
        if run.samples.growth is None and len(run.batch_sizes) == 1:
            run.samples.growth = run.batch_sizes[0]

    def _note_series(self) -> None:
        run = self.run
        for series, name in ((run.train, run.train_name), (run.eval, run.eval_name)):
            if series.stale_after is not None:
                run.notes.append(
                    f"{name}: the record went back and ends at step {series.stale_after}; "
                    "later steps are from before that"
                )

    def batch_size(self, settings: Mapping[str, Any]) -> None:
        """Take the global batch size (and tokens a step) from a run's settings, if they say it."""
        batch = step_number(settings.get("global_batch_size"))
        length = step_number(settings.get("seq_length"))
        if batch:
            self._batch_sizes.add(batch)
            self.run.tokens.growth = batch * length if length else None
