"""How strong the inputs of every product are over a text: what an error of a weight costs.

In: a model and a text file. Out: a `Calibration`: for each weight the mean square of each value of
K. The float model is compiled by rules into a folder that goes away, and run by our own runtime:
its forward tape stops before each product, whose input then lies in a planned buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dovetail.codegen.targets import host_target
from dovetail.compiler.formats.quantising import Advance, Calibration
from dovetail.compiler.models.source import TOKENIZER, ModelSource
from dovetail.compiler.plan.service import alone
from dovetail.compiler.request import CompileRequest, ModelRequest
from dovetail.compiler.tape.operators import named_slots
from dovetail.compiler.write.writer import half_made, sweep
from dovetail.ir.cache import cache_directory
from dovetail.ir.errors import CapacityError, SpecError
from dovetail.ir.model import ModelSpec
from dovetail.ir.tape import BufferRef, IntConst, Tape, WeightRef
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.engine.executor import CpuExecutor, make_engine
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.native.step import StepShape
from dovetail.runtime.schedule.request import SamplingParams
from dovetail.runtime.text.tokenizer import Tokenizer
from dovetail.topology.hardware import read_hardware

CALIBRATE = "calibrate-"
TOKENS = 8192
"""Tokens of the text that are run: means of squares hardly change beyond."""
WINDOW = 512
LEAST_TOKENS = 128

Array = npt.NDArray[Any]


def calibrate(
    request: ModelRequest,
    spec: ModelSpec,
    source: ModelSource,
    advance: Advance,
    compile_float: Callable[[CompileRequest], object],
) -> Calibration:
    """Run the float model over `request.calibrate`; `advance` is told of windows.

    compile_float: compiles what it is asked for, as `pipeline.compile_artifact`, which uses this.
    Raises SpecError for a text that cannot be read or is too short, or without a tokenizer.
    """
    assert request.calibrate is not None
    text = Path(request.calibrate)
    length = min(WINDOW, spec.max_context)
    # a longrope has other divisors in an artifact for contexts beyond those of training
    training = spec.rope.original_max_position if spec.rope.kind == "longrope" else 0
    windows = read_windows(text, source, spec, length)
    folder = request.cache or cache_directory()
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder, CALIBRATE)
    with half_made(folder, CALIBRATE) as place:
        float_request = CompileRequest(
            model=request.model,
            output=place / "float.dove",
            effort="none",
            max_context=min(spec.max_context, max(length, training + 1)),
            weight_dtype="bf16" if host_target().rounds_rows else "f32",
            max_step_tokens=max(WINDOW, request.max_step_sequences),
            cache=request.cache,
        )
        try:
            compile_float(float_request)
        except CapacityError as error:
            raise CapacityError(f"calibrating runs the model in floats first: {error}") from None
        powers = run_windows(Path(float_request.output), windows, advance)
    return Calibration(text, sum(map(len, windows)), powers)


def read_windows(text: Path, source: ModelSource, spec: ModelSpec, length: int) -> list[list[int]]:
    """Return windows of token ids from the start of a text, each as a prompt of its own."""
    content = source.file(TOKENIZER)
    if content is None:
        raise SpecError(f"{source.path} has no {TOKENIZER}, so a text cannot calibrate it")
    try:
        found = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{text} is not UTF-8 text ({error.reason} at {error.start})") from None
    except OSError as error:
        raise SpecError(f"cannot read {text}: {error.strerror}") from None
    tokenizer = Tokenizer(source.path / TOKENIZER, content)
    tokens = tokenizer.encode(found, special=False)[:TOKENS]
    if len(tokens) < LEAST_TOKENS:
        raise SpecError(
            f"{text} has {len(tokens)} tokens; give a text of {LEAST_TOKENS} or more, best of "
            f"{TOKENS}, to calibrate"
        )
    begin = tokenizer.encode("")[:1]
    begin = begin if begin == [spec.bos_token_id] else []
    step = length - len(begin)
    return [begin + tokens[start : start + step] for start in range(0, len(tokens), step)]


def run_windows(path: Path, windows: Sequence[Sequence[int]], advance: Advance) -> dict[str, Array]:
    """Return the mean square of each input value of the products of an artifact's model."""
    hardware = read_hardware()
    artifact = open_artifact(path, hardware)
    (part,) = artifact.models.values()
    options = EngineOptions(plan=alone(artifact.service))
    executor = _Watched(artifact, part, hardware, options)
    engine = make_engine(executor, options)
    every = SamplingParams(max_tokens=0, prompt_logprobs=0)
    try:
        for done, window in enumerate(windows):
            advance(done, len(windows))
            (request,) = engine.submit(window, every)
            while not request.finished:
                engine.step()
            if request.error is not None:
                raise request.error
    finally:
        engine.close()
    return {
        name: (total / executor.rows[name]).astype(np.float32)
        for name, total in executor.squares.items()
    }


class _Product(NamedTuple):
    """Where a product of a tape stands, its weight, and where its input rows lie.

    each: input rows for each of `rows`.
    """

    place: int
    weight: str
    buffer: str
    rows: str
    k: int
    each: int


def _products(tape: Tape) -> Iterator[_Product]:
    for place, entry in enumerate(tape.entries):
        slots = named_slots(entry)
        match slots.get("A"), slots.get("B"), slots.get("K"):
            case BufferRef(name=rows), WeightRef(name=str(weight)), IntConst(value=k):
                each = entry.groups.each if entry.groups else 1
                yield _Product(place, weight, rows, entry.m, k, each)


class _Watched(CpuExecutor):
    """An executor that adds up the squares of what its products read, on one process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.squares: dict[str, Array] = {}
        self.rows: dict[str, int] = {}

    def forward(self, shape: StepShape) -> None:
        """Run the tape from product to product."""
        bound, team = self.model.prefill, self.model.team
        args, tape = self.buffers.forward_args(shape, 1), bound.tape
        strides = {buffer.name: buffer.stride for buffer in tape.buffers}
        begun = 0
        for product in _products(tape):
            bound.run(team, args, range(begun, product.place))
            begun = product.place
            rows = bound.buffer(product.buffer).view(np.float32)
            rows = rows.reshape(-1, strides[product.buffer])
            count = args[product.rows] * product.each
            self._add(product.weight, rows[:count, : product.k])
        bound.run(team, args, range(begun, len(tape.entries)))

    def _add(self, weight: str, rows: Array) -> None:
        found = np.einsum("mk,mk->k", rows, rows, dtype=np.float64)
        self.squares[weight] = self.squares.get(weight, 0) + found
        self.rows[weight] = self.rows.get(weight, 0) + len(rows)
