"""Sampling: logits processors, grammar masks, draws and log-probabilities."""
