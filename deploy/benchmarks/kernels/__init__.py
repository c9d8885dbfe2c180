"""`bench kernels` and `bench roofline`: ops and decode steps relative to the device's peaks."""
