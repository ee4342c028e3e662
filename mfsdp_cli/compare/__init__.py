"""Whether two runs are the same run: readers, alignment, report. Knows no torch."""
