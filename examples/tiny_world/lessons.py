"""What the small Llama is trained on: a world goes in, texts of prompts and replies come out.

Each lesson is one context followed by several prompts and replies, so that a context is read once
for many answers. Worlds of lessons share no name with the bundled one's dev and test splits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

from dovetail.tiny_world import prompts
from dovetail.tiny_world.blocks import Block, Mix, PlainMix
from dovetail.tiny_world.calls import Segment, draw_conversation
from dovetail.tiny_world.shelves import fill_shelf
from dovetail.tiny_world.world import World

BLOCKS, EASY_BLOCKS = 6, 12
"""Prompts of a lesson, at most: no reply is wanted twice, or it could be copied from the first."""
FEW, MANY = (2, 3, 4), (2, 3, 4, 6, 8, 10, 12)
"""How many single statements an easy lesson holds."""
CHAT_SHARE, PLAIN_SHARE = 0.3, 0.15
"""Shares of lessons in the chat form, and without documents."""

Maker = TypeVar("Maker")


@dataclass(frozen=True, slots=True)
class Course:
    """What lessons are like.

    `easy` is the share, of those with documents, whose documents are single statements (one of
    `statements` many), which the replies repeat word for word: that is learnt first. `crowded` is
    the share whose documents look alike, as those a search brings. `plain` is what is asked in
    lessons without documents, every PLAIN_SHAREth part of all. `calling` is the share of lessons
    that are conversations with tools.
    """

    mix: Mix
    easy: float
    crowded: float
    plain: PlainMix
    statements: tuple[int, ...] = MANY
    calling: float = 0.0


def draw_lesson(rng: random.Random, world: World, course: Course) -> list[Segment]:
    """Return a lesson as segments whose texts, joined, are one training sequence."""
    if course.calling and rng.random() < course.calling:
        return draw_conversation(rng, world)
    if rng.random() < PLAIN_SHARE:
        blocks = [_draw(rng, course.plain)(rng, world) for _ in range(BLOCKS)]
        return _join(rng, "", blocks)
    is_easy = rng.random() < course.easy
    statements = course.statements if is_easy else ()
    shelf = fill_shelf(rng, world, statements, crowded=course.crowded)
    count = EASY_BLOCKS if is_easy else BLOCKS
    drawn = (_draw(rng, course.mix)(rng, world, shelf) for _ in range(2 * count))
    wanted = {block.reply: block for block in drawn if block is not None}
    lines = list(shelf.lines)
    rng.shuffle(lines)
    head = f"Documents:\n{prompts.bullets(lines)}\n"
    return _join(rng, head, list(wanted.values())[:count])


def _join(rng: random.Random, head: str, blocks: list[Block]) -> list[Segment]:
    """Lay blocks out as plain text, or as the chat template does."""
    segments: list[Segment] = []
    chat = rng.random() < CHAT_SHARE
    for block in blocks:
        if chat:
            text = f"{prompts.USER}{head}{block.prompt}{prompts.END}{prompts.ASSISTANT}"
            segments += [(text, False), (block.reply + prompts.END, True)]
        else:
            segments += [(head + block.prompt, False), (f" {block.reply}{prompts.END}", True)]
        head = "" if chat else "\n"
    return segments


def _draw(rng: random.Random, weighted: dict[Maker, float]) -> Maker:
    return rng.choices(list(weighted), list(weighted.values()))[0]
