"""The metrics of a gateway, and their exposition for Prometheus."""
