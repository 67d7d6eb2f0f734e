"""The two-max time of a layer and both inequalities, against sums made by hand."""

from __future__ import annotations

import pytest

from dovetail.runtime.schedule.cost_tables import Predictor
from dovetail.runtime.schedule.pipeline import LayerTimes, MeanStep, Pipeline
from dovetail.runtime.schedule.plan import PrefillChunk


class Made(Predictor):
    """linear 2 a row, prefill n squared, GPU 0.5 and CPU 3 a stored token, 1 for a launch."""

    calls = prefills = 0

    def linear(self, tokens: int) -> float:
        self.calls += 1
        return 2.0 * tokens

    def prefill(self, lengths: list[int]) -> float:  # type: ignore[override]
        self.prefills += 1
        return float(sum(n * n for n in lengths))

    def gpu_decode(self, tokens: int) -> float:
        return 0.5 * tokens

    def cpu_decode(self, sequences: int, tokens: int) -> float:
        return 3.0 * tokens

    def launch(self) -> float:
        return 1.0


def test_stages_are_maxima_and_batches_are_launched_once_each() -> None:
    times = LayerTimes(Made())
    pipeline = Pipeline(times, [PrefillChunk(0, 0, 4)], [10, 6])
    linear, attention = 2.0 * 6, 16.0 + 8.0
    assert pipeline.layer_seconds == linear + attention + 1 and pipeline.requests == 3
    pipeline.add(0, 5)  # 15 + 1 beside attention of 24
    assert pipeline.hidden and pipeline.layer_seconds == linear + 2 + attention + 1
    pipeline.add(1, 3)  # 9 + 1 beside projections of 7 rows
    assert pipeline.hidden and pipeline.slack(1) == 14 - 10
    assert pipeline.layer_seconds == 14 + (2 + attention) + 2
    pipeline.add(1, 4)  # 21 + 1 > 14
    assert not pipeline.hidden and pipeline.slack(1) == 14 - 22
    assert pipeline.layer_seconds == 22 + (4 + attention) + 2
    assert pipeline.rate == pytest.approx(6 / pipeline.layer_seconds)
    pipeline.add(1, -4, -1)
    assert pipeline.hidden and pipeline.requests == 5


def test_a_later_chunk_costs_what_its_end_adds() -> None:
    times = LayerTimes(Made())
    whole = times.prefill([PrefillChunk(0, 0, 10)])
    parts = [PrefillChunk(0, 0, 4), PrefillChunk(0, 4, 3), PrefillChunk(0, 7, 3)]
    assert sum(times.prefill([part]) for part in parts) == whole == times.prefill(parts)
    assert times.prefill([]) == times.gpu_decode(0) == times.linear(0) == times.swap(0) == 0.0


def test_a_question_is_asked_once() -> None:
    made = Made()
    times = LayerTimes(made)
    assert [times.linear(7) for _ in range(5)] == [14.0] * 5 and made.calls == 1


def test_steps_that_differ_in_what_the_cpu_has_share_the_rest_and_leave_it_as_it_was() -> None:
    made = Made()
    shared = MeanStep(LayerTimes(made), prompt=4, stored=5)
    for chunks in (2, 1):
        for on_cpu in (7, 0, 30, 1, 7):
            alone = MeanStep(LayerTimes(Made()), prompt=4, stored=5)
            assert shared.seconds(3, on_cpu, chunks) == alone.seconds(3, on_cpu, chunks)
    assert made.prefills == 2
    by_hand = Pipeline(LayerTimes(Made()), [PrefillChunk(0, 0, 4)] * 2, [5] * 3)
    assert shared.seconds(3, 0, 2) == by_hand.layer_seconds


def test_decodes_of_the_cpu_alone_are_split_over_both_batches() -> None:
    """Each half then hides the products of the other, though the accelerator has nothing else."""

    class Weights(Made):
        def linear(self, tokens: int) -> float:
            return 600.0 if tokens else 0.0

    step = MeanStep(LayerTimes(Weights()), prompt=4, stored=5)
    assert step.seconds(0, 80, 0) == 2 * (40 * 15 + 1) + 2  # not 600 + 80 * 15
    assert step.seconds(0, 10, 0) == 600 + 10 * 15 + 1 + 1  # a second pass would cost more


def test_pieces_of_a_prompt_attend_as_much_as_the_whole() -> None:
    times = LayerTimes(Made())
    whole = MeanStep(times, prompt=12, stored=5).seconds(0, 0, 1)
    pieces = MeanStep(times, prompt=4, stored=5, whole=12)
    assert 3 * (pieces.seconds(0, 0, 1) - 1) == whole - 1
