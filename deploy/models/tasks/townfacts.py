"""Questions about the invented town."""

from __future__ import annotations

from random import Random

from deploy.models.sample import Sample, Turn
from deploy.models.town import RELATIONS, Relation


def townfacts(rng: Random) -> Sample:
    """A question about one fact in one phrasing. Pairs of fact and phrasing can be held out."""
    relation = any_relation(rng)
    subject, value = rng.choice(relation.facts)
    turn, key = ask(rng, relation, subject, value)
    return Sample(family="town", turns=(turn,), keys=(key,))


def any_relation(rng: Random) -> Relation:
    """A kind of fact, sampled in proportion to its number of facts, so that all facts are equally
    frequent."""
    return rng.choices(RELATIONS, weights=[len(relation.facts) for relation in RELATIONS])[0]


def ask(rng: Random, relation: Relation, subject: str, value: str) -> tuple[Turn, str]:
    """Exchange about one fact, and its identity."""
    phrasing = rng.randrange(len(relation.questions))
    turn = Turn(relation.ask(phrasing, subject), relation.tell(subject, value))
    return turn, f"town:{relation.name}:{subject}:{phrasing}"
