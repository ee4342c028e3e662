"""What cannot be right, as one table of rules with a code each. Knows no torch."""
