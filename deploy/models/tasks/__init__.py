"""Task families of the demo model."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final, TypeAlias

from deploy.models.sample import Sample
from deploy.models.tasks.arithmetic import arithmetic
from deploy.models.tasks.copying import copying
from deploy.models.tasks.counting import counting
from deploy.models.tasks.followup import followup
from deploy.models.tasks.lists import reversing, sorting, sorting_any
from deploy.models.tasks.outside import outside
from deploy.models.tasks.records import records
from deploy.models.tasks.smalltalk import smalltalk
from deploy.models.tasks.townfacts import townfacts

Task: TypeAlias = Callable[[Random], Sample]
Tasks: TypeAlias = tuple[tuple[Task, float], ...]

TASKS: Final[Tasks] = (
    (arithmetic, 0.24),
    (counting, 0.15),
    (reversing, 0.11),
    (sorting, 0.17),
    (copying, 0.11),
    (records, 0.06),
    (townfacts, 0.04),
    (followup, 0.09),
    (smalltalk, 0.03),
)
"""Generators, and their shares of the training exchanges."""

POLISHING_TASKS: Final[Tasks] = (
    *((sorting_any if task is sorting else task, share) for task, share in TASKS),
    (outside, 0.05),
)
"""Generators of the third phase, and their relative shares."""

EVALUATED: Final = (
    arithmetic,
    counting,
    reversing,
    sorting,
    copying,
    records,
    townfacts,
    followup,
)
"""Generators of the held-out questions."""

__all__ = ["EVALUATED", "POLISHING_TASKS", "TASKS", "Task", "Tasks"]
