"""Drafts on a rank: who proposes them and what becomes of them."""
