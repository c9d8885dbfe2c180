"""Autoscaling: the target number of a model's workers, by the load that its gateways report."""
