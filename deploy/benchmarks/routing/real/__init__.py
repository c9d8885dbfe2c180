"""Benchmark `router --real`: routers as real processes, in turn, with equal workers and traffic."""
