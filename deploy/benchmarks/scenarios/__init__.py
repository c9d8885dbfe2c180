"""Scenarios: entire fleets under load, compared with a first-come, first-served fleet."""
