"""Real processes: routers in turn, in front of the same paced workers and traffic."""
