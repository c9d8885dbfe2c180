"""`bench kernels` and `bench roofline`: what ops and steps take of what the device gives."""
