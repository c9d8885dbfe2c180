"""Weights: reading, slicing per rank, and packing them."""
