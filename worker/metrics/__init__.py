"""What a worker and a node count, and how Prometheus reads it."""
