"""Which class implements which algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from worker.rank.diffusion.base import DiffusionAlgorithm
from worker.rank.diffusion.joint_threshold import JointThreshold
from worker.rank.diffusion.low_confidence import LowConfidence
from worker.wire.diffusion import DllmAlgorithm

ALGORITHMS: Final[Mapping[DllmAlgorithm, type[DiffusionAlgorithm]]] = MappingProxyType(
    {"LowConfidence": LowConfidence, "JointThreshold": JointThreshold}
)


def create_algorithm(name: DllmAlgorithm) -> DiffusionAlgorithm:
    """An algorithm by the name that `--dllm-algorithm` and requests give it."""
    return ALGORITHMS[name]()
