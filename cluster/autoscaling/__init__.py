"""How many workers a model has: from the load that gateways report to what Ray Serve is told."""
