"""Autoscaling: decides the target number of a model's workers from its gateways' load reports."""
