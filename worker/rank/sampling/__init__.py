"""Sampling: logits processors, grammar masks, sampling parameters and log-probabilities."""
