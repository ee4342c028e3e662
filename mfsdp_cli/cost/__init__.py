"""What a layout costs in memory and time. Knows no torch."""
