"""Layer specs, position-indexed RoPE and norms on top of megatron-core's GPT model."""
