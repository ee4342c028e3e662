"""What is trained, exactly: model descriptions and their parameters. Knows no torch."""
