"""Speculation gate: drafts for each request, as far as their acceptance pays for their cost."""
