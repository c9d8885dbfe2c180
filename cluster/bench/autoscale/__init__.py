"""`python -m cluster.bench.autoscale`: workers follow a load step and ten minutes of noisy load."""
