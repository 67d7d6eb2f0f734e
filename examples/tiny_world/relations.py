"""What the world's texts can say: kinds of entities, their relations, and every wording of each.

In all templates {s} stands for the subject and {o} for the object. Statements restate the question
and end with the object, so that the short answer is read off their last words.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Relation:
    """A property of entities of kind `subject`; `object` is a kind of entity or of value.

    `phrase` names the object through the subject (the inner part of a two-hop question), `compare`
    is a comparison question with {a} and {b}, `least` says that the smaller value wins and `winner`
    what it is called.
    """

    name: str
    subject: str
    object: str
    statement: str
    phrase: str
    questions: tuple[str, ...]
    sentences: tuple[str, ...]
    compare: str = ""
    winner: str = ""
    least: bool = True


RELATIONS = (
    Relation(
        name="capital",
        subject="country",
        object="city",
        statement="The capital of {s} is {o}.",
        phrase="the capital of {s}",
        questions=(
            "What is the capital of {s}?",
            "Which city is the capital of {s}?",
            "Name the capital city of {s}.",
        ),
        sentences=(
            "The capital of {s} is {o}.",
            "{s} is governed from its capital, {o}.",
            "{o} serves as the capital of {s}.",
            "The government of {s} sits in the capital city of {o}.",
        ),
    ),
    Relation(
        name="language",
        subject="country",
        object="language",
        statement="The language of {s} is {o}.",
        phrase="the language of {s}",
        questions=(
            "What is the language of {s}?",
            "Which language do people speak in {s}?",
            "What language is spoken in {s}?",
        ),
        sentences=(
            "The people of {s} speak {o}.",
            "{o} is the language spoken in {s}.",
            "The official language of {s} is {o}.",
            "In {s} schools teach in {o}.",
        ),
    ),
    Relation(
        name="river",
        subject="country",
        object="river",
        statement="The longest river of {s} is {o}.",
        phrase="the longest river of {s}",
        questions=(
            "What is the longest river of {s}?",
            "Which river is the longest in {s}?",
            "Name the longest river in {s}.",
        ),
        sentences=(
            "The longest river of {s} is {o}.",
            "{o} is the longest river in {s}.",
            "No river in {s} is longer than {o}.",
        ),
    ),
    Relation(
        name="country",
        subject="city",
        object="country",
        statement="The country of {s} is {o}.",
        phrase="the country of {s}",
        questions=(
            "In which country is {s}?",
            "Which country does {s} belong to?",
            "What is the country of {s}?",
        ),
        sentences=(
            "{s} is a city in {o}.",
            "{s} lies in {o}.",
            "{s} belongs to {o}.",
            "Travellers find {s} in the hills of {o}.",
        ),
    ),
    Relation(
        name="settler",
        subject="city",
        object="person",
        statement="The founder of {s} is {o}.",
        phrase="the founder of {s}",
        questions=(
            "Who founded {s}?",
            "Who is the founder of {s}?",
            "By whom was {s} founded?",
        ),
        sentences=(
            "{s} was founded by {o}.",
            "The founder of {s} was {o}.",
            "{o} founded {s}.",
            "A statue of {o}, who founded {s}, stands at the gate.",
        ),
    ),
    Relation(
        name="settled",
        subject="city",
        object="year",
        statement="The founding year of {s} is {o}.",
        phrase="the founding year of {s}",
        questions=(
            "When was {s} founded?",
            "In which year was {s} founded?",
            "What is the founding year of {s}?",
        ),
        sentences=(
            "{s} was founded in {o}.",
            "{s} dates from the year {o}.",
            "The founding of {s} goes back to {o}.",
        ),
        compare="Which city is older, {a} or {b}?",
        winner="the older city",
    ),
    Relation(
        name="craft",
        subject="city",
        object="craft",
        statement="The craft of {s} is {o}.",
        phrase="the craft of {s}",
        questions=(
            "What is the craft of {s}?",
            "Which craft is {s} known for?",
            "What is {s} famous for?",
        ),
        sentences=(
            "{s} is known for its {o}.",
            "Many families in {s} live by {o}.",
            "{s} is famous for {o}.",
            "The old craft of {s} is {o}.",
        ),
    ),
    Relation(
        name="birthplace",
        subject="person",
        object="country",
        statement="The birthplace of {s} is {o}.",
        phrase="the birthplace of {s}",
        questions=(
            "Where was {s} born?",
            "What is the birthplace of {s}?",
            "In which country was {s} born?",
        ),
        sentences=(
            "{s} was born in {o}.",
            "{s} comes from {o}.",
            "The birthplace of {s} is {o}.",
            "{s} grew up in {o}, the land of birth.",
        ),
    ),
    Relation(
        name="job",
        subject="person",
        object="job",
        statement="The job of {s} is {o}.",
        phrase="the job of {s}",
        questions=(
            "What is the job of {s}?",
            "What does {s} do for a living?",
            "Which profession does {s} have?",
        ),
        sentences=(
            "{s} works as a {o}.",
            "{s} is a {o}.",
            "{s} earns a living as a {o}.",
            "By profession {s} is a {o}.",
        ),
    ),
    Relation(
        name="born",
        subject="person",
        object="year",
        statement="The birth year of {s} is {o}.",
        phrase="the birth year of {s}",
        questions=(
            "When was {s} born?",
            "In which year was {s} born?",
            "What is the birth year of {s}?",
        ),
        sentences=(
            "{s} was born in the year {o}.",
            "{s} has lived since {o}.",
            "The birth year of {s} is {o}.",
        ),
        compare="Who was born first, {a} or {b}?",
        winner="the elder",
    ),
    Relation(
        name="spouse",
        subject="person",
        object="person",
        statement="The spouse of {s} is {o}.",
        phrase="the spouse of {s}",
        questions=(
            "Who is the spouse of {s}?",
            "To whom is {s} married?",
            "Who married {s}?",
        ),
        sentences=(
            "{s} is married to {o}.",
            "The spouse of {s} is {o}.",
            "{o} and {s} are married.",
        ),
    ),
    Relation(
        name="founder",
        subject="company",
        object="person",
        statement="The founder of {s} is {o}.",
        phrase="the founder of {s}",
        questions=(
            "Who founded {s}?",
            "Who is the founder of {s}?",
            "By whom was {s} founded?",
        ),
        sentences=(
            "{s} was founded by {o}.",
            "{o} is the founder of {s}.",
            "{o} started {s} in a small workshop.",
        ),
    ),
    Relation(
        name="seat",
        subject="company",
        object="city",
        statement="The seat of {s} is {o}.",
        phrase="the seat of {s}",
        questions=(
            "Where is the seat of {s}?",
            "In which city is {s} based?",
            "Which city is the seat of {s}?",
        ),
        sentences=(
            "{s} has its seat in {o}.",
            "{s} is based in {o}.",
            "The offices of {s} stand in {o}.",
        ),
    ),
    Relation(
        name="product",
        subject="company",
        object="product",
        statement="The product of {s} is {o}.",
        phrase="the product of {s}",
        questions=(
            "What does {s} make?",
            "What is the product of {s}?",
            "Which goods does {s} sell?",
        ),
        sentences=(
            "{s} makes {o}.",
            "{s} sells {o} all over the world.",
            "The workshops of {s} turn out {o}.",
        ),
    ),
    Relation(
        name="author",
        subject="book",
        object="person",
        statement="The author of {s} is {o}.",
        phrase="the author of {s}",
        questions=(
            "Who wrote {s}?",
            "Who is the author of {s}?",
            "By whom was {s} written?",
        ),
        sentences=(
            "{s} was written by {o}.",
            "{o} is the author of {s}.",
            "The author of {s} is {o}.",
        ),
    ),
    Relation(
        name="printed",
        subject="book",
        object="year",
        statement="The publication year of {s} is {o}.",
        phrase="the publication year of {s}",
        questions=(
            "When was {s} published?",
            "In which year was {s} published?",
            "What is the publication year of {s}?",
        ),
        sentences=(
            "{s} was published in {o}.",
            "{s} first appeared in {o}.",
            "Readers have known {s} since {o}.",
        ),
        compare="Which book is older, {a} or {b}?",
        winner="the older book",
    ),
    Relation(
        name="theme",
        subject="book",
        object="theme",
        statement="The theme of {s} is {o}.",
        phrase="the theme of {s}",
        questions=(
            "What is the theme of {s}?",
            "What is {s} about?",
            "Which theme does {s} treat?",
        ),
        sentences=(
            "{s} tells a story of {o}.",
            "{s} is about {o}.",
            "The theme of {s} is {o}.",
        ),
    ),
    Relation(
        name="length",
        subject="river",
        object="length",
        statement="The length of {s} in kilometers is {o}.",
        phrase="the length of {s}",
        questions=(
            "How long is {s}?",
            "How many kilometers long is {s}?",
            "What is the length of {s}?",
        ),
        sentences=(
            "{s} is {o} kilometers long.",
            "{s} flows for {o} kilometers.",
            "From spring to sea {s} measures {o} kilometers.",
        ),
        compare="Which river is longer, {a} or {b}?",
        winner="the longer river",
        least=False,
    ),
    Relation(
        name="mouth",
        subject="river",
        object="city",
        statement="The city at the mouth of {s} is {o}.",
        phrase="the city at the mouth of {s}",
        questions=(
            "Which city lies at the mouth of {s}?",
            "Where does {s} reach the sea?",
            "At which city does {s} meet the sea?",
        ),
        sentences=(
            "{s} reaches the sea at {o}.",
            "At the mouth of {s} lies the city of {o}.",
            "{s} meets the sea near {o}.",
        ),
    ),
)

INVERSE = {"capital": "country", "spouse": "spouse"}
"""(s, capital, o) settles that the country of o is s."""

KINDS = ("country", "city", "river", "person", "company", "book")
OF_KIND: dict[str, tuple[Relation, ...]] = {
    kind: tuple(r for r in RELATIONS if r.subject == kind) for kind in KINDS
}
