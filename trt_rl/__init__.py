"""BF16 Megatron-core training and FP8 rollout engines on Ray, joined by a verified refit."""

__version__ = "0.1.0"
