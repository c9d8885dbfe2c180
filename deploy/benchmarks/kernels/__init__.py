"""Benchmarks `kernels` and `roofline`: ops and decode steps relative to the device's peaks."""
