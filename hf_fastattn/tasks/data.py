"""The data of the task pack: text that comes with Python, and seeded random questions. No network is used.

The text is `pydoc_data.topics`, the language reference of `help()`. It differs between versions of Python, so scores are only
comparable on one version.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Louis")
THINGS = ("bicycle", "boat", "coat", "door", "guitar", "hat", "house", "kite", "lamp", "umbrella")
COLOURS = ("black", "blue", "brown", "green", "grey", "orange", "purple", "red", "white", "yellow")
WORDS = ("amber", "bridge", "candle", "desert", "engine", "forest", "garden", "harbour", "island", "jacket", "ladder", "mirror")
CITIES = ("Athens", "Berlin", "Cairo", "Delhi", "Havana", "Lisbon", "London", "Madrid", "Oslo", "Paris", "Rome", "Vienna")


def _chapters(least: int) -> list[str]:
    """All chapters of at least `least` characters, sorted by name."""
    from pydoc_data.topics import topics  # imported here, because some distributions of Python lack it

    return [chapter for _, chapter in sorted(topics.items()) if len(chapter) >= least]


def text() -> str:
    """All chapters of about a page or more."""
    return "\n\n".join(_chapters(2000))


def _split(docs: list[dict[str, Any]]) -> dict[str, Dataset]:
    from datasets import Dataset

    return {"test": Dataset.from_list(docs)}


def pages(characters: int = 2000, examples: int = 20, **further: Any) -> dict[str, Dataset]:
    """Chapters of the reference, each cut to `characters` characters."""
    return _split([{"page": chapter[:characters]} for chapter in _chapters(characters)[:examples]])


def choices(examples: int = 50, facts: int = 6, seed: int = 0, **further: Any) -> dict[str, Dataset]:
    """Statements about who owns what, and a question about one of them with four colours to choose from."""
    draw = random.Random(seed)
    docs = []
    for _ in range(examples):
        owners, things, colours = (draw.sample(words, facts) for words in (NAMES, THINGS, COLOURS))
        said = [f"{owner} has a {colour} {thing}." for owner, colour, thing in zip(owners, colours, things, strict=True)]
        asked = draw.randrange(facts)
        offered = [*draw.sample([colour for colour in colours if colour != colours[asked]], 3), colours[asked]]
        draw.shuffle(offered)
        question = f"The colour of {owners[asked]}'s {things[asked]} is"
        docs.append({"question": " ".join([*said, question]), "choices": offered, "answer": offered.index(colours[asked])})
    return _split(docs)


def needles(characters: int = 2000, examples: int = 20, seed: int = 0, **further: Any) -> dict[str, Dataset]:
    """A sentence hidden at evenly spaced depths of an excerpt of the reference, which the model has to repeat."""
    draw, whole = random.Random(seed), text()
    depths = [i / max(1, examples - 1) for i in range(examples)]
    draw.shuffle(depths)
    docs = []
    for depth in depths:
        start = draw.randrange(max(1, len(whole) - characters))
        hay = whole[start : start + characters].splitlines()
        city, phrase = draw.choice(CITIES), " ".join(draw.sample(WORDS, 5))
        hay.insert(round(depth * len(hay)), f"The secret phrase of {city} is: {phrase}.")
        docs.append({"hay": "\n".join(hay), "city": city, "phrase": phrase, "depth": depth})
    return _split(docs)
