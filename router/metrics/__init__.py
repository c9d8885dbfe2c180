"""What a gateway counts, and how Prometheus reads it."""
