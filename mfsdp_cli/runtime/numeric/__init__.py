"""Numeric validation: a layout and the one-rank reference, side by side, number by number."""

from mfsdp_cli.runtime.numeric.run import NumericResult, run_numeric

__all__ = ["NumericResult", "run_numeric"]
