from __future__ import annotations

import random

import pytest

from dovetail.tiny_world import prompts
from dovetail.tiny_world.lessons import EASY_BLOCKS, JUDGING, READING, draw_lesson
from dovetail.tiny_world.world import World, build_world

COUNTS = {"country": 30, "city": 70, "river": 30, "person": 140, "company": 40, "book": 40}


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(9, COUNTS)


def test_replies_follow_from_what_stands_before_them(world: World) -> None:
    """Each answered value stands in the documents; every skill is taught, in both forms."""
    rng = random.Random(3)
    cues: dict[str, int] = {}
    chats = 0
    for _ in range(400):
        lesson = draw_lesson(rng, world, JUDGING, 0.3)
        chats += prompts.ASSISTANT in lesson[0][0]
        head = lesson[0][0]
        for (prompt, is_reply), (reply, _) in zip(lesson[::2], lesson[1::2], strict=True):
            assert not is_reply and reply.endswith(prompts.END)
            cue = prompt.removesuffix(prompts.ASSISTANT).removesuffix(prompts.END)
            cue = cue.rpartition("\n")[2]
            cues[cue] = cues.get(cue, 0) + 1
            text = reply.removesuffix(prompts.END).strip()
            if cue == "Answer:" and not text.endswith(" unknown."):
                assert text.removesuffix(".").split()[-1] in head
            if cue == "Relevant:" and text != prompts.NONE:
                assert all(line.removeprefix("- ") in head for line in text.splitlines())
    assert set(cues) == {"Answer:", "Relevant:", "Refined:", "Next question:", "Passage:"}
    assert min(cues.values()) >= 50 and 60 <= chats <= 180


def test_no_reply_of_a_lesson_with_documents_is_wanted_twice(world: World) -> None:
    rng = random.Random(5)
    for _ in range(200):
        lesson = draw_lesson(rng, world, JUDGING, 0.5)
        if "Documents:" in lesson[0][0]:
            replies = [text for text, is_reply in lesson if is_reply]
            assert len(set(replies)) == len(replies) <= EASY_BLOCKS


def test_easy_lessons_hold_crowds_of_one_relation(world: World) -> None:
    """Half of them ask for one of many things of a kind, whose names alone tell them apart."""
    rng = random.Random(6)
    crowds = 0
    for _ in range(300):
        head = draw_lesson(rng, world, READING, 1.0)[0][0]
        lines = [line for line in head.splitlines() if line.startswith("- ")]
        starts = {" ".join(line.partition(": ")[2].split()[:3]) for line in lines}
        crowds += len(lines) >= 6 and len(starts) == 1
    assert crowds >= 30
