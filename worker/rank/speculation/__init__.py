"""Speculative decoding on a rank: proposers, placement of rows, and verification of drafts."""
