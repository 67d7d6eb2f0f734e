"""Where a step's time goes: every call of both tapes is in its row, and rows make up the step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import DeviceError, SpecError
from dovetail.runtime.app import App, load
from dovetail.runtime.engine.calls import CallProfile, profile_calls
from dovetail.runtime.schedule.request import Request, SamplingParams
from tests.models import save_model


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("calls")
    save_model(folder / "model", "llama")
    options = {"effort": "none", "max_step_tokens": 64, "max_context": 256}
    compile_model(folder / "model", output=folder / "app.dove", **options)  # type: ignore[arg-type]
    with load(folder / "app.dove", threads=2, kv_blocks=128) as loaded:
        yield loaded


def called(profile: CallProfile) -> dict[str, int]:
    return {row.op: row.calls for row in profile.rows}


@pytest.mark.parametrize("sequences", [1, 3])
def test_every_call_of_a_step_is_counted_once(app: App, sequences: int) -> None:
    found = profile_calls(app.engine, sequences=sequences, context=40, seconds=0.05)
    tape, sample = app.engine.executor.model.decode.tape, app.engine.executor.sampler.tape
    wanted = Counter(entry.op for entry in (*tape.entries, *sample.entries))
    del wanted["prefill_attention"]  # no rows
    assert called(found) == wanted | {"before": 1, "between": 1, "after": 1}
    assert found.sequences == sequences and found.context > 40
    assert [row.op for row in found.rows][-3:] == ["between", "sample", "after"]
    assert all(row.step_us > 0 and row.wait_us >= 0 for row in found.rows)


def test_products_tell_the_bytes_they_read(app: App) -> None:
    weights = app.engine.executor.model.weights.entries
    rows = {row.op: row for row in profile_calls(app.engine, context=40, seconds=0.05).rows}
    assert rows["head"].weight_bytes == weights["head"].bytes
    down = sum(entry.bytes for name, entry in weights.items() if name.endswith(".down"))
    assert rows["down"].weight_bytes == down
    read = rows["down"].weight_gb_s
    assert read is not None and read == pytest.approx(down / rows["down"].step_us / 1e3)
    assert {op for op, row in rows.items() if row.weight_bytes} == {
        *("qkv", "o", "gate_up", "down", "head")
    }


def test_the_engine_is_left_as_it_was(app: App) -> None:
    prompt = [1 + i % 90 for i in range(40)]
    before = app.generate([prompt], max_tokens=8)[0].token_ids
    profile_calls(app.engine, sequences=2, context=40, seconds=0.05)
    assert (
        app.engine.executor.model.decode.times is None and app.engine.executor.sampler.times is None
    )
    assert not app.engine.scheduler.busy
    assert app.generate([prompt], max_tokens=8)[0].token_ids == before


def test_what_cannot_be_decoded_at_once_is_refused(app: App) -> None:
    with pytest.raises(SpecError, match="cannot be decoded at once"):
        profile_calls(app.engine, context=250)
    with pytest.raises(SpecError, match=r"cannot be decoded at once; .* and 0 tokens"):
        profile_calls(app.engine, sequences=1000)
    (request,) = app.engine.submit([1, 2, 3], SamplingParams())
    with pytest.raises(SpecError, match="busy"):
        profile_calls(app.engine)
    app.engine.finish(request, "abort")


def test_a_request_that_fails_ends_the_profile(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with damaged weights: it would never have the tokens that are waited for."""
    steps, step = itertools.count(), app.engine.step

    def bounded() -> list[Request]:
        assert next(steps) < 100, "it goes on for ever"
        return step()

    def fail(*_: object) -> None:
        raise DeviceError("broken")

    monkeypatch.setattr(app.engine, "step", bounded)
    monkeypatch.setattr(app.engine.executor, "compute", fail)
    with pytest.raises(DeviceError, match="broken"):
        profile_calls(app.engine, context=40)
    assert not app.engine.scheduler.busy
