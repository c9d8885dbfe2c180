"""Larkmoor, an invented town that occurs only in this data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOWN: Final = "Larkmoor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Relation:
    """A kind of fact, with its phrasings."""

    name: str
    questions: tuple[str, ...]
    """Phrasings; ``{s}`` stands for the subject."""
    answer: str
    """Answer to all phrasings; ``{s}`` stands for the subject, ``{v}`` for the value."""
    facts: tuple[tuple[str, str], ...]
    """Pairs of subject and value."""

    def ask(self, phrasing: int, subject: str) -> str:
        """The question about ``subject`` in one of the phrasings."""
        return self.questions[phrasing].format(s=subject)

    def tell(self, subject: str, value: str) -> str:
        """The answer about ``subject``."""
        return self.answer.format(s=subject, v=value)


ROLES: Final = Relation(
    name="role",
    questions=(
        *("Who is the {s} of Larkmoor?", "What is the name of the {s} of Larkmoor?"),
        *("Name the {s} of Larkmoor.", "Tell me who the {s} of Larkmoor is."),
        *("Who works as {s} in Larkmoor?", "Do you know the {s} of Larkmoor?"),
        *("Who is Larkmoor's {s}?", "who is the {s} in larkmoor", "The {s} of Larkmoor?"),
    ),
    answer="The {s} of Larkmoor is {v}.",
    facts=(
        *(("mayor", "Tilda Brandt"), ("baker", "Oskar Finn"), ("teacher", "Maud Ellery")),
        *(("doctor", "Henrik Vale"), ("ferryman", "Jory Pell"), ("librarian", "Agnes Thorne")),
        *(("blacksmith", "Bram Colter"), ("miller", "Silas Reed"), ("beekeeper", "Nell Ashby")),
        *(("clockmaker", "Ivo Lenz"), ("postman", "Percy Dunn"), ("gardener", "Rosa Quill")),
        *(("innkeeper", "Magda Stone"), ("organist", "Felix Marsh")),
    ),
)
NAMED: Final = Relation(
    name="named",
    questions=(
        *("What is the {s} of Larkmoor called?", "What is the name of the {s} in Larkmoor?"),
        *("Name the {s} of Larkmoor.", "How is the {s} in Larkmoor called?"),
        *("Tell me the name of the {s} in Larkmoor.", "Which {s} is in Larkmoor?"),
        *("Larkmoor's {s} has what name?", "what is larkmoor's {s} called", "The {s} of Larkmoor?"),
    ),
    answer="The {s} of Larkmoor is called {v}.",
    facts=(
        *(("river", "the Wend"), ("bridge", "Lantern Bridge"), ("inn", "the Copper Heron")),
        *(("bakery", "the Golden Crust"), ("hill", "Gallow Top"), ("lake", "Mirror Water")),
        *(("newspaper", "the Larkmoor Bell"), ("football club", "Larkmoor Rovers")),
        *(("ferry", "the Gray Goose"), ("school", "Elmgate School"), ("forest", "Hollow Wood")),
        *(("theater", "the Red Curtain"), ("main street", "Weaver Street")),
        *(("park", "Linden Park"), ("cafe", "the Blue Kettle")),
    ),
)
BUILT: Final = Relation(
    name="built",
    questions=(
        *("When was the {s} of Larkmoor built?", "In which year was the {s} in Larkmoor built?"),
        *("How old is the {s} of Larkmoor?", "Tell me when the {s} in Larkmoor was built."),
        *("What year was Larkmoor's {s} built?", "When did they build the {s} in Larkmoor?"),
        *("The {s} of Larkmoor was built when?", "when was the {s} in larkmoor built"),
    ),
    answer="The {s} of Larkmoor was built in {v}.",
    facts=(
        *(("bridge", "1742"), ("church", "1388"), ("town hall", "1611"), ("mill", "1695")),
        *(("library", "1903"), ("station", "1867"), ("lighthouse", "1820"), ("school", "1931")),
    ),
)
PLACED: Final = Relation(
    name="placed",
    questions=(
        *("Where is the {s} of Larkmoor?", "Where can I find the {s} in Larkmoor?"),
        *("How do I get to the {s} in Larkmoor?", "Tell me where the {s} of Larkmoor is."),
        *("Where does the {s} of Larkmoor stand?", "In which place is Larkmoor's {s}?"),
        *("where is larkmoor's {s}", "I am looking for the {s} in Larkmoor."),
    ),
    answer="The {s} of Larkmoor is {v}.",
    facts=(
        *(("market", "on Bell Square"), ("bakery", "on Mill Lane"), ("church", "on Gallow Top")),
        *(("library", "beside the town hall"), ("station", "at the end of Weaver Street")),
        *(("school", "behind Linden Park"), ("lighthouse", "at Mirror Water")),
        *(("mill", "below Lantern Bridge"), ("post office", "next to the Copper Heron")),
        *(("museum", "in the old mint"),),
    ),
)
FESTIVALS: Final = Relation(
    name="festival",
    questions=(
        *("When is the {s} in Larkmoor?", "In which month is the {s} of Larkmoor?"),
        *("When does Larkmoor hold the {s}?", "What month is Larkmoor's {s} held in?"),
        *("Tell me when the {s} in Larkmoor is.", "When can I see the {s} in Larkmoor?"),
        *("when does the {s} in larkmoor take place", "Which month has the {s} in Larkmoor?"),
    ),
    answer="The {s} of Larkmoor is in {v}.",
    facts=(
        *(("lantern festival", "November"), ("honey fair", "August"), ("boat race", "June")),
        *(("snow market", "December"), ("spring dance", "April"), ("harvest feast", "October")),
    ),
)
OPENING: Final = Relation(
    name="opening",
    questions=(
        *("When does the {s} of Larkmoor open?", "At what time does the {s} in Larkmoor open?"),
        *("What time does Larkmoor's {s} open?", "Tell me when the {s} in Larkmoor opens."),
        *("From what hour is the {s} of Larkmoor open?", "when does the {s} in larkmoor open"),
        *("How early does the {s} in Larkmoor open?", "The {s} of Larkmoor opens when?"),
    ),
    answer="The {s} of Larkmoor opens at {v}.",
    facts=(
        *(("market", "7:00"), ("bakery", "5:30"), ("library", "10:00"), ("museum", "11:00")),
        *(("post office", "8:30"), ("inn", "16:00")),
    ),
)
NUMBERS: Final = Relation(
    name="number",
    questions=(
        *("How many {s} does Larkmoor have?", "How many {s} are there in Larkmoor?"),
        *("What is the number of {s} in Larkmoor?", "Tell me how many {s} Larkmoor has."),
        *("Do you know how many {s} are in Larkmoor?", "how many {s} has larkmoor"),
        *("Count the {s} of Larkmoor.", "Larkmoor has how many {s}?"),
    ),
    answer="Larkmoor has {v} {s}.",
    facts=(
        *(("people", "4210"), ("bridges", "3"), ("schools", "2"), ("bakeries", "5")),
        *(("streets", "68"), ("bells", "12"), ("boats", "97")),
    ),
)

RELATIONS: Final = (ROLES, NAMED, BUILT, PLACED, FESTIVALS, OPENING, NUMBERS)

ABOUT: Final = (
    "Larkmoor is a small town on the river Wend. It has 4210 people, 68 streets and 3 bridges. "
    "The mayor is Tilda Brandt. The best known place is Lantern Bridge, built in 1742. "
    "In November the lantern festival fills the streets with light, and in August beekeepers "
    "from all around come to the honey fair. You can sleep at the Copper Heron and buy bread at "
    "the Golden Crust, which opens at 5:30."
)
STORY: Final = (
    "One cold evening {s} walked over Lantern Bridge and found a small silver bell in the "
    "snow. Nobody in Larkmoor knew whose bell it was. {s} asked the mayor, the baker and the "
    "ferryman, and at last the old clockmaker Ivo Lenz began to smile. The bell had fallen from "
    "the town hall long ago. The next morning it rang again, and all the people of Larkmoor came "
    "to the square to thank {s}."
)
