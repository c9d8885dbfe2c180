"""Runs Plans: the loop, the executors that carry them to the ranks, the runner on each rank."""
