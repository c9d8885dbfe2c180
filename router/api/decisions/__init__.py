"""Decisions: typed questions about a text, answered by the probabilities of label tokens."""
