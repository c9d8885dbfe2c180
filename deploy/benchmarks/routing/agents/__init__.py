"""Closed loops of coding agents: a session sends its next request after the last one has ended."""
