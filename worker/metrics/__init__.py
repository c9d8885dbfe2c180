"""Metrics of a worker and of a node, for Prometheus."""
