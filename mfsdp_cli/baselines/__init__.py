"""What the engine is measured against: Megatron-Core's DistOpt and the one-rank reference."""
