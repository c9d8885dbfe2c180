"""The page at /: a playground and a view of the fleet."""
