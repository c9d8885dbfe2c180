"""Sampling: edits of logits, masks, draws and log-probabilities."""
