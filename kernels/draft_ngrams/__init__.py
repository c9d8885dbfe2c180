"""Prompt lookup (n-gram drafts) on the device: the tokens that followed an earlier occurrence of a
request's latest tokens."""

from __future__ import annotations

from kernels.draft_ngrams.base import NgramLookup
from kernels.draft_ngrams.reference import draft_ngrams, follow_ngram

__all__ = ["NgramLookup", "draft_ngrams", "follow_ngram"]
