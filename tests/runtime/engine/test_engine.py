"""The executor on a model that answers wrongly as soon as one block, slot or row is wrong."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.ir.errors import CapacityError, RequestError
from dovetail.runtime.app import App, load
from dovetail.runtime.native.step import StepShape
from dovetail.runtime.schedule.plan import SchedulerSettings
from tests.runtime.schedule.integrity import check_integrity
from tests.runtime.throttle import Throttle

MakeArtifact = Callable[..., Path]
Answer = Callable[..., list[int]]


def random_prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 100, 192])
@pytest.mark.parametrize("threads", [1, 2])
def test_prompts_across_block_and_chunk_edges(
    make_artifact: MakeArtifact, answer: Answer, length: int, threads: int
) -> None:
    prompt = random_prompts(length, 1, 1)[0] * length
    with load(make_artifact(), threads=threads) as app:
        (done,) = app.generate(prompt, max_tokens=40, ignore_eos=True)
        assert list(done.token_ids) == answer(prompt, 40, eos=False)
        assert done.finish_reason == "length"
        check_integrity(app.engine.scheduler.pool)


@pytest.mark.parametrize("kv_blocks", [16, 24, 64])
def test_batches_join_leave_and_are_preempted(
    make_artifact: MakeArtifact, answer: Answer, kv_blocks: int
) -> None:
    prompts = random_prompts(3, 20, 150)
    with load(make_artifact(kv_blocks=kv_blocks)) as app:
        done = app.generate(prompts, max_tokens=60)
        assert [list(d.token_ids) for d in done] == [answer(p, 60) for p in prompts]
        check_integrity(app.engine.scheduler.pool)
        assert app.engine.scheduler.pool.free_blocks == kv_blocks
        preempted = sum(d.metrics.preemptions for d in done)
        assert (preempted > 0) == (kv_blocks < 64)


@pytest.mark.parametrize("threads", [(1, 2), (2, 1)])
def test_phases_switch_thread_counts(
    make_artifact: MakeArtifact, answer: Answer, threads: tuple[int, int]
) -> None:
    prompts = random_prompts(6, 8, 40)
    with load(make_artifact(threads=threads)) as app:
        plans = (
            app.engine.executor.model.prefill.plan.threads,
            app.engine.executor.model.decode.plan.threads,
        )
        assert plans == tuple(min(count, len(os.sched_getaffinity(0))) for count in threads)
        done = app.generate(prompts, max_tokens=20)
        assert [list(d.token_ids) for d in done] == [answer(p, 20) for p in prompts]


def test_finish_reasons(make_artifact: MakeArtifact, answer: Answer) -> None:
    prompts = random_prompts(9, 30, 20)
    with load(make_artifact()) as app:
        for prompt, done in zip(prompts, app.generate(prompts, max_tokens=50), strict=True):
            assert list(done.token_ids) == answer(prompt, 50)
            assert (done.finish_reason == "stop") == (done.token_ids[-1] == 5)


def test_samples_of_one_prompt_share_its_full_blocks(
    make_artifact: MakeArtifact, answer: Answer
) -> None:
    prompt = random_prompts(1, 1, 1)[0] * 100
    with load(make_artifact()) as app:
        done = app.generate(prompt, n=3, max_tokens=20)
        assert [list(d.token_ids) for d in done] == [answer(prompt, 20)] * 3
        assert [d.metrics.cached_tokens for d in done] == [0, 96, 96]


@pytest.mark.parametrize("keep", [True, False])
def test_a_prompt_is_not_computed_again_where_it_begins_like_an_earlier_one(
    make_artifact: MakeArtifact, answer: Answer, keep: bool
) -> None:
    context = random_prompts(2, 1, 1)[0] * 70
    prompts = [[*context, *tail] for tail in random_prompts(7, 6, 20)]
    expected = [answer(p, 20) for p in prompts]
    settings = SchedulerSettings(keep_prefixes=keep)
    with load(make_artifact(), settings=settings) as app:
        rows = count_rows(app)
        first = app.generate(prompts[0], max_tokens=20)
        again = [app.generate(p, max_tokens=20)[0] for p in prompts[1:]]
        assert [list(d.token_ids) for d in (*first, *again)] == expected
        assert [d.metrics.cached_tokens for d in again] == [64 if keep else 0] * 5
        asked = sum(map(len, prompts))
        generated = sum(len(tokens) - 1 for tokens in expected)  # the last one is never stored
        assert sum(rows) == asked + generated - 5 * 64 * keep
        check_integrity(app.engine.scheduler.pool)


def test_kept_prefixes_give_way_to_what_runs(make_artifact: MakeArtifact, answer: Answer) -> None:
    prompts = random_prompts(12, 30, 150)
    with load(make_artifact(kv_blocks=16)) as app:
        for prompt in (*prompts, *prompts[::-1]):
            (done,) = app.generate(prompt, max_tokens=60)
            assert list(done.token_ids) == answer(prompt, 60)
        check_integrity(app.engine.scheduler.pool)
        assert app.engine.scheduler.pool.free_blocks == 16


def count_rows(app: App) -> list[int]:
    """Return a list to which each step adds the token rows that it computes."""
    rows: list[int] = []
    forward = app.engine.executor.forward

    def counted(shape: StepShape) -> None:
        rows.append(shape.n_tokens)
        forward(shape)

    app.engine.executor.forward = counted  # type: ignore[method-assign]
    return rows


def test_sampling_depends_on_seed_and_sample_not_on_the_batch(
    make_artifact: MakeArtifact,
) -> None:
    prompts = random_prompts(5, 6, 40)
    options = {"temperature": 1.0, "seed": 11, "max_tokens": 12, "ignore_eos": True}
    with load(make_artifact()) as app:
        together = app.generate(prompts, n=2, **options)
        alone = [c for p in prompts for c in app.generate([p], n=2, **options)]
        assert [c.token_ids for c in together] == [c.token_ids for c in alone]
        assert together[0].token_ids != together[1].token_ids
        other = app.generate(prompts[0], **{**options, "seed": 12})
        assert other[0].token_ids != together[0].token_ids


def test_logprobs(make_artifact: MakeArtifact) -> None:
    with load(make_artifact()) as app:
        (done,) = app.generate([1, 2, 3], max_tokens=4, logprobs=3)
        assert done.logprobs is not None
        for token, entry in zip(done.token_ids, done.logprobs, strict=True):
            assert entry.token_id == token == entry.top[0][0]
            assert len(entry.top) == 3
            assert entry.top[0][1] - entry.top[1][1] == pytest.approx(0.1, abs=1e-5)
        assert app.generate([1, 2, 3], max_tokens=4)[0].logprobs is None


def test_streams_give_what_generate_gives(make_artifact: MakeArtifact, answer: Answer) -> None:
    with load(make_artifact()) as app:
        chunks = list(app.stream([4, 4, 4], max_tokens=30))
        assert [t for c in chunks for t in c.token_ids] == answer([4, 4, 4], 30)
        assert [c.finish_reason is None for c in chunks] == [True] * (len(chunks) - 1) + [False]


def test_a_stream_left_early_frees_its_blocks(make_artifact: MakeArtifact) -> None:
    with load(make_artifact()) as app:
        throttle = Throttle(app)
        throttle.allow(2)
        stream = app.stream([1] * 40, max_tokens=30, ignore_eos=True)
        next(stream)
        assert app.engine.scheduler.pool.free_blocks < 64
        stream.close()
        assert throttle.steps == 2
        assert app.engine.scheduler.pool.free_blocks == 64 and not app.engine.scheduler.busy


def test_threads_share_one_app(make_artifact: MakeArtifact, answer: Answer) -> None:
    prompts = random_prompts(8, 12, 60)
    got: dict[int, list[int]] = {}
    with load(make_artifact()) as app:

        def work(i: int) -> None:
            got[i] = list(app.generate(prompts[i], max_tokens=30)[0].token_ids)

        workers = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert [got[i] for i in range(len(prompts))] == [answer(p, 30) for p in prompts]


@pytest.mark.parametrize(
    ("prompts", "options", "error", "words"),
    [
        ([[1] * 256], {}, RequestError, "context"),
        ([[]], {}, RequestError, "empty"),
        ([[97]], {}, RequestError, "outside"),
        ([[-1]], {}, RequestError, "outside"),
        (["text"], {}, RequestError, "tokenizer"),
        ([[1.5]], {}, RequestError, "token ids"),
        ([7.5], {}, RequestError, "token ids"),
        ([[1]], {"stop": "x"}, RequestError, "tokenizer"),
        ([[1]], {"max_tokens": 0}, RequestError, "max_tokens"),
        ([[1]], {"temprature": 1}, RequestError, "temprature"),
        ([[1] * 200], {"max_tokens": 50}, CapacityError, "pool"),
    ],
)
def test_wrong_requests_are_refused_and_change_nothing(
    make_artifact: MakeArtifact,
    prompts: list[object],
    options: dict[str, object],
    error: type[Exception],
    words: str,
) -> None:
    with load(make_artifact(kv_blocks=14)) as app:
        with pytest.raises(error, match=words):
            app.generate([[1, 2], *prompts], **options)  # type: ignore[list-item]
        assert not app.engine.scheduler.busy
        assert app.engine.scheduler.pool.free_blocks == 14


def test_a_closed_app_refuses(make_artifact: MakeArtifact) -> None:
    app = load(make_artifact())
    app.close()
    app.close()
    with pytest.raises(RequestError, match="closed"):
        app.generate([1])


def test_context_bounds_the_answer(make_artifact: MakeArtifact, answer: Answer) -> None:
    prompt = [3] * 250
    with load(make_artifact()) as app:
        (done,) = app.generate(prompt, max_tokens=1000, ignore_eos=True)
        assert list(done.token_ids) == answer(prompt, 6, eos=False)
        assert done.finish_reason == "length"


@pytest.mark.parametrize(
    "prompts", [None, 5, b"ab", {1: 2}, {1, 2}, [None], [1.5], [[1.5]], [b"a"]]
)
def test_what_is_no_prompt_is_refused(make_artifact: MakeArtifact, prompts: Any) -> None:
    with load(make_artifact()) as app:
        with pytest.raises(RequestError, match=r"lists? of token ids"):
            app.generate(prompts)
        with pytest.raises(RequestError, match="list of token ids"):
            app.stream(prompts)
        assert app.generate([]) == []
