from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dovetail.tiny_world import prompts
from dovetail.tiny_world.blocks import (
    CONCLUDING,
    DOUBTING,
    FINISHING,
    JUDGING,
    PLANNING,
    READING,
    Mix,
)
from dovetail.tiny_world.lessons import EASY_BLOCKS, FEW, Course, draw_lesson
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
        lesson = draw_lesson(rng, world, Course(JUDGING, easy=0.3, crowded=0.8, plain=CONCLUDING))
        chats += prompts.ASSISTANT in lesson[0][0]
        head = lesson[0][0]
        for (prompt, is_reply), (reply, _) in zip(lesson[::2], lesson[1::2], strict=True):
            assert not is_reply and reply.endswith(prompts.END)
            head = prompt if "Documents:" in prompt else head
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
        lesson = draw_lesson(rng, world, Course(JUDGING, easy=0.5, crowded=0.8, plain=PLANNING))
        if "Documents:" in lesson[0][0]:
            replies = [text for text, is_reply in lesson if is_reply]
            assert len(set(replies)) == len(replies) <= EASY_BLOCKS


def test_what_the_steps_of_a_question_found_is_joined_to_its_answer(world: World) -> None:
    """Such lessons show each step's statement as a document; the answer ends the last of them."""
    rng = random.Random(8)
    joined = 0
    for _ in range(400):
        lesson = draw_lesson(rng, world, Course(JUDGING, easy=0.0, crowded=0.0, plain=CONCLUDING))
        for (prompt, _), (reply, _) in zip(lesson[::2], lesson[1::2], strict=True):
            documents = prompt.rpartition("Documents:\n")[2].partition("\nQuestion:")[0]
            last = documents.splitlines()[-1] if documents else ""
            two_hop = " of the " in reply and ": " not in documents
            if two_hop and prompt.count("Documents:") == 1 and "Answer:" in prompt:
                assert reply.split(" is ")[-1].startswith(last.split(" is ")[-1].removesuffix("."))
                joined += 1
    assert joined >= 20


def count_crowds(world: World, course: Course) -> int:
    """Return how many of 300 lessons hold three or more statements of one relation only."""
    rng = random.Random(6)
    crowds = 0
    for _ in range(300):
        head = draw_lesson(rng, world, course)[0][0]
        lines = [line for line in head.splitlines() if line.startswith("- ")]
        starts = {" ".join(line.partition(": ")[2].split()[:3]) for line in lines}
        crowds += len(lines) >= 3 and len(starts) == 1
    return crowds


def test_easy_lessons_of_a_crowded_course_hold_things_that_names_alone_tell_apart(
    world: World,
) -> None:
    crowded = Course(READING, easy=1.0, crowded=0.8, plain=PLANNING)
    assert count_crowds(world, crowded) >= 60
    assert count_crowds(world, replace(crowded, crowded=0.0)) <= 6


def test_a_course_says_how_many_statements_an_easy_lesson_holds(world: World) -> None:
    rng = random.Random(7)
    course = Course(READING, easy=1.0, crowded=0.0, plain=PLANNING, statements=FEW)
    heads = [draw_lesson(rng, world, course)[0][0] for _ in range(100)]
    held = {head.split("\nQuestion:")[0].count("\n- ") for head in heads if "Documents:" in head}
    assert held == set(FEW)


def count_missed(world: World, mix: Mix) -> int:
    """Return how often crowds are asked for what they tell, but of somebody they do not name."""
    rng = random.Random(4)
    missed = 0
    for _ in range(300):
        lesson = draw_lesson(rng, world, Course(mix, easy=1.0, crowded=1.0, plain=PLANNING))
        lines = [line for line in lesson[0][0].splitlines() if line.startswith("- ")]
        starts = {" ".join(line.partition(": ")[2].split()[:3]) for line in lines}
        for reply in (text.strip() for text, is_reply in lesson if is_reply):
            told, _, denied = reply.removesuffix(prompts.END).partition(" is unknown")
            name = " ".join(told.split()[3:])
            alike = " ".join(told.split()[:3]) in starts
            missed += bool(denied) and alike and not any(name in line for line in lines)
    return missed


def test_doubting_asks_crowds_for_one_whom_they_do_not_name(world: World) -> None:
    assert count_missed(world, DOUBTING) >= 4 * count_missed(world, FINISHING) >= 40
