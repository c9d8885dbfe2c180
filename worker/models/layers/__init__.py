"""Layers of model architectures, with tensor parallelism."""
