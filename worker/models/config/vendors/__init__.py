"""Schemas of model families, one module per vendor."""
