"""Closed loops of coding agents: a session sends its next request after the previous one has
ended."""
