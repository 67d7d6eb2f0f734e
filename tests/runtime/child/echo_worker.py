"""A child that says again what it is told; some words have it fail, fall silent or end."""

from __future__ import annotations

import os
import time

import msgspec

from dovetail.ir.errors import SpecError
from dovetail.runtime.child.framing import Channel


class Word(msgspec.Struct, frozen=True):
    """What is said, and by which process."""

    text: str
    pid: int = 0


def serve(channel: Channel) -> None:
    """Answer until the parent hangs up."""
    for word in channel.messages(Word):
        if word.text == "die":
            os._exit(3)
        if word.text == "fail":
            raise SpecError("no such word")
        if word.text == "sleep":
            time.sleep(600)
        channel.send(Word(word.text, os.getpid()))
