"""One rank: runs Plans on its device, from inputs to sampled tokens."""
