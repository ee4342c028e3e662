"""Where each piece of the model lives: Megatron's layout grammar and splits. Knows no torch."""
