"""Words of the world's texts: values of relations, and what passages say beside facts."""

from __future__ import annotations

JOBS = tuple(
    """
    baker painter doctor sailor teacher lawyer farmer singer chemist carpenter poet judge
    miner tailor mechanic dancer botanist printer
    """.split()
)
PRODUCTS = tuple(
    """
    lamps clocks boats carpets violins bicycles lenses ropes candles bricks pianos maps knives
    tea salt paper soap cheese
    """.split()
)
CRAFTS = tuple(
    """
    weaving pottery glassmaking fishing shipbuilding brewing printing beekeeping woodcarving
    clockmaking papermaking mining
    """.split()
)
SUBJECTS = tuple(
    """
    winter exile friendship war music memory hunger travel justice astronomy childhood revenge
    gardens inheritance
    """.split()
)
YEARS = (1350, 1990)
LENGTHS = (1000, 3999)

VALUES: dict[str, tuple[str, ...]] = {
    "job": JOBS,
    "product": PRODUCTS,
    "craft": CRAFTS,
    "theme": SUBJECTS,
}
RANGES: dict[str, tuple[int, int]] = {"year": YEARS, "length": LENGTHS}
GENERIC: dict[str, str] = {
    "country": "the country",
    "city": "the city",
    "company": "the company",
    "book": "the book",
    "river": "the river",
}
"""How a later sentence of a passage may name its subject; a person goes by the family name."""
FILLERS: dict[str, tuple[str, ...]] = {
    "country": ("Its hills are green all year.", "Few roads cross the border."),
    "city": ("The market opens at dawn.", "Old walls surround the centre."),
    "river": ("Its water is cold and clear.", "Herons nest along the banks."),
    "person": ("Friends praise a quick wit.", "Mornings begin with a long walk."),
    "company": ("The gates open before sunrise.", "Visitors are welcome on Fridays."),
    "book": ("Critics admired the calm style.", "A worn copy lies in many homes."),
}
