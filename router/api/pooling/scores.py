"""Scores from logits and from embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from worker.protocol.pooling import Activation


def activated(logits: Sequence[float], activation: Activation) -> list[float]:
    """Computes the scores of labels from their logits."""
    if activation == "none":
        return list(logits)
    if activation == "sigmoid":
        return [_sigmoid(value) for value in logits]
    largest = max(logits)
    weights = [math.exp(value - largest) for value in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Cosine of the angle between two vectors; 0 if either vector is zero."""
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    lengths = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / lengths if lengths else 0.0


def _sigmoid(value: float) -> float:
    if value >= 0.0:
        return 1.0 / (1.0 + math.exp(-value))
    weight = math.exp(value)
    return weight / (1.0 + weight)
