"""Routing policies against each other on simulated workers, in simulated time."""
