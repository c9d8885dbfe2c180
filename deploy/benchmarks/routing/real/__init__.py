"""Benchmark `router --real`: real router processes, in turn, with equal workers and traffic."""
