"""What a step brought is told in messages that can be read, however much it is."""

from __future__ import annotations

import socket

import msgspec

from dovetail.runtime.apart.wire import Ended, News, Record, Told, pack_told
from dovetail.runtime.framing import INLET_BYTES, LENGTH, MAX_MESSAGE, Inlet, pack_value
from dovetail.runtime.host import EngineLoad
from dovetail.runtime.request import Metrics, TokenLogprob
from dovetail.runtime.timeline import Timeline

MOST = 2000


def read(messages: list[bytes]) -> list[Told]:
    return [msgspec.msgpack.decode(each[LENGTH.size :], type=Told) for each in messages]


def test_a_long_message_is_told_in_parts() -> None:
    tokens = list(range(300))
    logprobs = [TokenLogprob(token, -0.5, ((token, -0.5), (7, -2.0))) for token in tokens]
    timeline = Timeline(lambda: 0.0)
    track = timeline.track("engine", "steps")
    for _ in range(100):
        timeline.mark(track, "a step", 0.0)
    news = [
        News(4, [5]),
        News(6, tokens, logprobs, Metrics(1.0), Ended("length")),
        *(News(number, [1, 2]) for number in range(10, 200)),
    ]
    told = Told(2.0, EngineLoad(running=3), news, [9], timeline.drain())
    messages = pack_told(told, MOST)
    assert len(messages) > 10 and max(map(len, messages)) <= MOST
    parts = read(messages)
    assert {(part.now, part.load.running) for part in parts} == {(2.0, 3)}
    found = [each for part in parts for each in part.news if each.number == 6]
    assert [token for each in found for token in each.tokens] == tokens
    assert [one for each in found for one in each.logprobs] == logprobs
    assert [each.end for each in found] == [None] * (len(found) - 1) + [Ended("length")]
    assert found[-1].metrics == Metrics(1.0)
    scored = News(6, [3, 4], logprobs[:2], Metrics(1.0), Ended("length"), logprobs)
    found = [part.news[0] for part in read(pack_told(Told(2.0, EngineLoad(), [scored]), MOST))]
    assert len(found) > 4 and [one for each in found for one in each.prompt_logprobs] == logprobs
    assert [token for each in found for token in each.tokens] == [3, 4]
    assert all(each.metrics == Metrics(1.0) for each in found) and found[-1].end is not None
    order = list(dict.fromkeys(each.number for part in parts for each in part.news))
    assert order == [each.number for each in news]
    assert [part.tickets for part in parts if part.tickets] == [[9]] and parts[-1].tickets
    assert told.drawn is not None
    drawn = [part.drawn for part in parts if part.drawn is not None]
    assert [event for each in drawn for event in each.events] == told.drawn.events
    assert all(each.tracks == told.drawn.tracks for each in drawn)


def test_a_short_message_is_told_as_it_is() -> None:
    told = Told(2.0, EngineLoad(), [News(4, [5])])
    assert pack_told(told) == [pack_value(told)]


def test_an_inlet_reads_messages_of_any_length_until_the_peer_hangs_up() -> None:
    ours, theirs = socket.socketpair()
    values = [Record(on=True), Record(on=False, ticket=5)]
    long = News(1, [1] * (INLET_BYTES + 1000))
    with ours, theirs:
        ours.sendall(pack_value(values[0]) + pack_value(values[1]) + pack_value(values[0])[:-1])
        inlet = Inlet(theirs)
        assert [inlet.receive(Record) for _ in values] == values
        ours.close()
        assert inlet.receive(Record) is None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inlet = Inlet(theirs)
        pending = [inlet.pending]
        ours.sendall(pack_value(values[0]) * 2)
        for _ in values:
            pending.append(inlet.pending)
            inlet.receive(Record)
        pending.append(inlet.pending)
        ours.close()
        assert [*pending, inlet.pending] == [False, True, True, False, True]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack_value(long)[:INLET_BYTES])
        inlet = Inlet(theirs)
        ours.sendall(pack_value(long)[INLET_BYTES:] + LENGTH.pack(MAX_MESSAGE + 1))
        assert inlet.receive(News) == long
        assert inlet.receive(News) is None
