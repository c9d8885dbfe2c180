"""The metrics of a gateway, and how Prometheus reads them."""
