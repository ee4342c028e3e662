"""The line that says how a run goes: step, loss, norm, tokens a second, time left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mfsdp_cli.output import output

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_LINES = 20
_SMOOTHING = 20


class Progress:
    """Shown on stderr: a bar on a terminal, else a line now and then. Silent on other ranks."""

    def __init__(self, steps: int, shown: bool) -> None:
        self._steps = steps
        self._shown = shown
        self._every = max(1, steps // _LINES)
        self._recent: list[float] = []
        self._bar: Bar | None = None
        if shown and output.interactive():
            self._open_bar()

    def _open_bar(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=output.console(err=True),
        )
        self._task = self._bar.add_task("", total=self._steps)
        self._bar.start()

    def step(self, step: int, loss: float, norm: float, seconds: float, tokens: int) -> None:
        """A training step of ``tokens`` tokens is done."""
        if not self._shown:
            return
        self._recent = [*self._recent[1 - _SMOOTHING :], seconds]
        mean = sum(self._recent) / len(self._recent)
        text = (
            f"loss {loss:.4f}  norm {norm:.3f}  {tokens / max(mean, 1e-9):,.0f} tokens/s"
            f"  {_clock((self._steps - step) * mean)} left"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif step == 1 or step % self._every == 0 or step == self._steps:
            output.log(f"step {step}/{self._steps}  {text}")

    def evaluation(self, step: int, loss: float) -> None:
        """An evaluation after a step is done."""
        if not self._shown:
            return
        text = f"step {step}/{self._steps}  validation loss {loss:.4f}"
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            output.log(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
