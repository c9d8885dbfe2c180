"""Layers that architectures are built of, with their tensor parallelism."""
