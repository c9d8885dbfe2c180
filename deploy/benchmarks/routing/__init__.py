"""Comparisons of routing policies, mostly on simulated workers in simulated time."""
