"""mfsdp: plan, prove, run and compare pipeline-parallel layouts for Megatron-FSDP v2."""

__version__ = "0.1.0"
