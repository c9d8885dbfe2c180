"""Comparisons of routing policies, mostly with simulated workers in simulated time."""
