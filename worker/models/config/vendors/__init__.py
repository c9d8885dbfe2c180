"""Schemas of model families, one page per vendor."""
