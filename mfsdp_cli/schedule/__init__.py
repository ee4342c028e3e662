"""When each piece runs: orders, lowering passes, the graph and its proof. Knows no torch."""
