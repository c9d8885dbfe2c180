"""Prompt tokenization off the event loop, and sampling defaults of checkpoints."""
