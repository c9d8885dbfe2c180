"""Scenarios: whole fleets under traffic, compared with a first come, first served fleet."""
