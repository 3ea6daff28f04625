"""Packed, long-context pre-training on top of megatron-core."""

__version__ = "0.1.0"
