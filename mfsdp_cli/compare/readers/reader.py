"""What a reader of text lines is."""

from __future__ import annotations

from typing import ClassVar, Protocol

from mfsdp_cli.compare.collector import Collector
from mfsdp_cli.compare.lines import Line


class LineReader(Protocol):
    """Turns the lines of one format into a run.

    A reader is chosen because it claims lines of the file; it then sees every line of it in
    order, also those that it does not claim.
    """

    #: As in the JSON document.
    name: ClassVar[str]
    #: What its lines look like, for the error where nothing was recognized.
    looked_for: ClassVar[str]

    def __init__(self, collector: Collector) -> None: ...

    @property
    def format(self) -> str:
        """The format as found; more exact than :attr:`name` where the lines tell."""

    @property
    def may_be_empty(self) -> bool:
        """Whether what was read is a run even if it has no loss at all."""

    @staticmethod
    def claims(text: str) -> bool:
        """Whether this line is a record of this format."""

    def read(self, line: Line) -> None:
        """Take in one line."""

    def end(self) -> None:
        """The file is over."""
