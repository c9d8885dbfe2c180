"""Drafts: who proposes them, what becomes of them, and when they are worth their cost."""
