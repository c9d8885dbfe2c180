"""Prompts to token ids, off the event loop; sampling defaults of checkpoints."""
