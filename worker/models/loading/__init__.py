"""Loading of weights: reading, sharding and packing."""
