"""Scenarios: the whole system under traffic, against first come first served."""
