"""Speculative decoding on a rank: proposers, positions of speculative rows, and verification of
drafts."""
