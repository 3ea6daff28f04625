"""Attention over packed sequences: segments, kernels and the module megatron-core calls."""
