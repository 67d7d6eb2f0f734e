"""Turns a planned batch into the arguments of the forward and sample tapes.

All arrays are allocated once for the largest step; filling them allocates nothing of step size. One
argument is a number: into how many parts decode attention cuts each sequence's keys, so that all
threads have work (`count_parts`; a merge joins them again).
"""

from __future__ import annotations

import math
import mmap
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dovetail.ir.model import KV_BLOCK, MAX_KV_SPLITS, ModelSpec
from dovetail.ir.tape import ADAPTER_ARGS, OUT_ARGS, STATE_ARGS
from dovetail.runtime.schedule.kv_pool import blocks_for
from dovetail.runtime.schedule.plan import Batch, PrefillChunk
from dovetail.runtime.schedule.request import Request

ROW_ALIGN = 16
PAGE = mmap.PAGESIZE

_WORD = (1 << 64) - 1
DRAWS, KEPT_BLOCKS = 64, 1024
"""Random numbers that are made together, as one alone costs as much; how many such blocks stay."""
_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))

Blocks: TypeAlias = "array[int] | npt.NDArray[np.int32]"
"""The blocks of a sequence in order, int32."""

_Shape = tuple[type[np.generic], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a filled step, and the requests whose logits come out, in row order.

    A request is one of `outputs` for each of its rows, drafted ones too.
    Behind the rows of `outputs`, which get a token, lie those of `scored`: prompts, and positions
    of theirs whose logits score the next token. A prompt that ends here and that nothing follows is
    one of them even without any. `decoders` counts the requests that decode, `longest_decode` the
    tokens of the longest: how keys are cut goes by these, so that drafts do not change it.
    """

    n_tokens: int
    n_prefill: int
    n_decode: int
    prefill_tokens: int
    decoders: int
    longest_decode: int
    outputs: tuple[Request, ...]
    scored: tuple[tuple[Request, range], ...] = ()
    adapted: bool = False  # some rows are of adapters

    @property
    def n_out(self) -> int:
        """Rows of logits."""
        scored = sum(len(positions) for _, positions in self.scored) if self.scored else 0
        return len(self.outputs) + scored

    @property
    def touched(self) -> tuple[Request, ...]:
        """Once it was run: the requests that got a token or ended."""
        ended = [one for one, _ in self.scored if one.finished]
        return tuple(dict.fromkeys((*self.outputs, *ended)))


def step_bytes(spec: ModelSpec, max_tokens: int, max_sequences: int) -> int:
    """Return the bytes that the arrays of StepBuffers take, each rounded up to a page."""
    shapes = _shapes(spec, max_tokens, max_sequences)
    return sum(-(-_nbytes(*shape) // PAGE) * PAGE for shape in shapes.values())


class StepBuffers:
    """Argument arrays of one step. Row order: prefill sequences, then one row per decode."""

    def __init__(
        self,
        alloc: Callable[[int], npt.NDArray[np.uint8]],
        spec: ModelSpec,
        max_tokens: int,
        max_sequences: int,
    ) -> None:
        shapes = _shapes(spec, max_tokens, max_sequences)
        self.arrays: dict[str, npt.NDArray[Any]] = {
            name: alloc(_nbytes(dtype, shape)).view(dtype).reshape(shape)
            for name, (dtype, shape) in shapes.items()
        }
        buffers: dict[str, Any] = self.arrays
        self._cells: dict[str, Any] = {name: memoryview(array) for name, array in buffers.items()}
        """For single numbers, which a memoryview takes faster than numpy does."""
        self.vocab_size = spec.vocab_size
        self._adapters = {name: number for number, name in enumerate(spec.adapters, 1)}
        addresses = {name: int(a.ctypes.data) for name, a in self.arrays.items()}
        stride = {"logits_stride": self.arrays["logits"].shape[1]}
        tables = {"table_stride": self.arrays["block_tables"].shape[1]}
        given = (*_FORWARD_ARRAYS, *(n for n in (*OUT_ARGS, *STATE_ARGS) if n in addresses))
        self.addresses = {name: addresses[name] for name in given} | tables | stride
        """The forward tape's arguments that are the same in every step."""
        self._whose = {name: addresses[name] for name in ADAPTER_ARGS if name in addresses}
        self._sample = {name: addresses[name] for name in _SAMPLE_ARRAYS} | stride
        self._sampled: tuple[Request, ...] = ()  # whose parameters lie in the arrays
        self._again: set[int] = set()  # outputs that were drawn again
        self._iota = np.arange(spec.max_context, dtype=np.int32)

    def fill(
        self,
        batch: Batch,
        requests: Mapping[int, Request],
        table: Callable[[int], Blocks],
        slot: Callable[[int], int] | None = None,
    ) -> StepShape:
        """Write the arrays for `batch`; `table` gives the blocks of a request, `slot` its state."""
        row, sequence = 0, 0
        self._again.clear()
        outputs: list[Request] = []
        scored: list[tuple[Request, range]] = []
        score_rows: list[int] = []
        self._cells["seq_starts"][0] = 0
        for chunk in batch.prefill:
            request = requests[chunk.request]
            self._put(request, table(request.id), chunk, sequence, row)
            ends = chunk.start + chunk.length == len(request.tokens)
            if chunk.scores or (ends and not request.max_tokens):
                scored.append((request, chunk.scores))
                score_rows += [row + at - chunk.start for at in chunk.scores]
            row, sequence = row + chunk.length, sequence + 1
            self._cells["seq_starts"][sequence] = row
            if ends and request.max_tokens:
                self._cells["out_rows"][len(outputs)] = row - 1
                outputs.append(request)
        prefill_tokens = row
        decodes = [requests[number] for number in (*batch.gpu_decode, *batch.cpu_decode)]
        if self._adapters:  # rows of one are computed together where they are neighbours
            decodes.sort(key=lambda request: request.params.adapter)
        decoders, longest = self._put_decodes(decodes, table, sequence, row, len(outputs))
        outputs += decodes
        count = len(outputs) + len(score_rows)
        if slot is not None and "state_slots" in self._cells:
            numbers = (*(c.request for c in batch.prefill), *(r.id for r in decodes))
            self.arrays["state_slots"][: len(numbers)] = [*map(slot, numbers)]
        if score_rows:
            self.arrays["out_rows"][len(outputs) : count] = score_rows
        if "out_tables" in self.arrays:
            self._put_outputs(count, sequence, row)
        return StepShape(
            n_tokens=row + len(decodes),
            n_prefill=len(batch.prefill),
            n_decode=len(decodes),
            prefill_tokens=prefill_tokens,
            decoders=decoders,
            longest_decode=longest,
            outputs=tuple(outputs),
            scored=tuple(scored),
            adapted=bool(self._adapters)
            and self._put_adapters([requests[c.request] for c in batch.prefill], decodes, count),
        )

    def _put(
        self, request: Request, table: Blocks, chunk: PrefillChunk, sequence: int, row: int
    ) -> None:
        start, length, end = chunk.start, chunk.length, chunk.start + chunk.length
        blocks = np.frombuffer(table, np.int32)[: blocks_for(end)]
        positions = self._iota[start:end]
        arrays = self.arrays
        arrays["token_ids"][row : row + length] = request.tokens[start:end]
        arrays["positions"][row : row + length] = positions
        slots = arrays["kv_slots"][row : row + length]
        slots[:] = blocks[positions // KV_BLOCK]
        slots *= KV_BLOCK
        slots += positions % KV_BLOCK
        arrays["seq_lengths"][sequence] = end
        arrays["block_tables"][sequence, : len(blocks)] = blocks

    def _put_decodes(
        self,
        decodes: Sequence[Request],
        table: Callable[[int], Blocks],
        sequence: int,
        row: int,
        output: int,
    ) -> tuple[int, int]:
        """Write one row for each of `decodes`; return the requests and the tokens of the longest.

        Where a request comes again its drafted tokens follow, each as a sequence of its own with
        the same blocks: all rows of a step are stored before any looks at them.
        """
        before, ahead, decoders, longest = None, 0, 0, 0
        cells, tables = self._cells, self.arrays["block_tables"]
        ids, positions, slots = cells["token_ids"], cells["positions"], cells["kv_slots"]
        lengths, out_rows = cells["seq_lengths"], cells["out_rows"]
        for number, request in enumerate(decodes):
            ahead = ahead + 1 if request is before else 0
            before, token = request, request.drafted[ahead - 1] if ahead else request.tokens[-1]
            at, blocks = request.computed + ahead, table(request.id)
            index, place = divmod(at, KV_BLOCK)
            tables[sequence + number, : index + 1] = np.frombuffer(blocks, np.int32, index + 1)
            ids[row + number], positions[row + number] = token, at
            slots[row + number] = int(blocks[index]) * KV_BLOCK + place
            lengths[sequence + number] = at + 1
            out_rows[output + number] = row + number
            if not ahead:
                decoders, longest = decoders + 1, max(longest, at + 1)
        return decoders, longest

    def _put_outputs(self, count: int, prompts: int, row: int) -> None:
        """Write of each output row what attention of single rows goes by.

        prompts: sequences that prefill, whose rows come before `row`.
        """
        arrays = self.arrays
        rows = arrays["out_rows"][:count]
        behind = np.searchsorted(arrays["seq_starts"][1 : prompts + 1], rows, "right")
        sequences = np.where(rows < row, behind, prompts + rows - row)
        positions = arrays["out_positions"][:count]
        positions[:] = arrays["positions"][rows]
        arrays["out_lengths"][:count] = positions + 1
        width = blocks_for(int(positions.max(initial=0)) + 1)
        arrays["out_tables"][:count, :width] = arrays["block_tables"][sequences, :width]

    def _put_adapters(
        self, prompts: Sequence[Request], decodes: Sequence[Request], count: int
    ) -> bool:
        """Write whose rows are whose adapter's, of `count` outputs, too; return whether any are."""
        of_prompts, of_decodes = (
            [self._adapters.get(request.params.adapter, 0) for request in requests]
            for requests in (prompts, decodes)
        )
        if not any(of_prompts) and not any(of_decodes):
            return False
        lengths = np.diff(self.arrays["seq_starts"][: len(prompts) + 1])
        rows = [*np.repeat(of_prompts, lengths), *of_decodes]
        whose, outputs = (self.arrays[name] for name in ADAPTER_ARGS)
        whose[: len(rows)] = rows
        outputs[:count] = whose[self.arrays["out_rows"][:count]]
        return True

    def forward_args(self, shape: StepShape, kv_splits: int) -> dict[str, int]:
        """Return the forward tape's arguments for a filled step."""
        return {
            **self.addresses,
            **(self._whose if shape.adapted else {}),
            "n_tokens": shape.n_tokens,
            "n_prefill": shape.n_prefill,
            "n_decode": shape.n_decode,
            "n_out": shape.n_out,
            "kv_splits": kv_splits,
        }

    def sample_args(self, shape: StepShape, row: int | None = None) -> dict[str, int]:
        """Write the sampling parameters of the outputs and return the sample tape's arguments.

        Of rows that score, the tape takes the likeliest token: with its logit it gives their sum.
        row: the one that is drawn again, alone; its second number holds until the next `fill`.
        """
        if row is not None:
            self._again.add(row)
        elif shape.outputs != self._sampled:  # else they are as they were in the last step
            for place, request in enumerate(shape.outputs):
                for name in _PARAMETERS:
                    self.arrays[name][place] = getattr(request.params, name)
            self._sampled = shape.outputs
        before, ahead = None, 0
        for place, request in enumerate(shape.outputs):
            ahead, before = ahead + 1 if request is before else 0, request
            if request.params.temperature > 0 and row in (None, place):
                again = int(place in self._again)
                self._cells["uniform"][place] = draw_uniform(request, ahead, again)
        if row is not None:
            skipped = {name: row * self.arrays[name].strides[0] for name in _SAMPLE_ARRAYS}
            return {n: at + skipped.get(n, 0) for n, at in self._sample.items()} | {"n_rows": 1}
        if shape.scored:
            self.arrays["temperature"][len(shape.outputs) : shape.n_out] = 0.0
        return {**self._sample, "n_rows": shape.n_out}

    def chosen(self, row: int) -> tuple[int, float]:
        """Return the token chosen for output `row`, and its log probability."""
        return int(self._cells["out_ids"][row]), float(self._cells["out_logprobs"][row])

    def choose_likeliest(self, row: int) -> None:
        """Choose the token of the largest logit of output `row`; no log probability is told."""
        logits = self.logits(row)
        token = int(logits.argmax())
        self._cells["out_ids"][row], self._cells["out_logprobs"][row] = token, logits[token]

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the raw logits of output `row` [vocab]; overwritten by the next step."""
        found: npt.NDArray[np.float32] = self.arrays["logits"][row, : self.vocab_size]
        return found


def draw_uniform(request: Request, ahead: int = 0, again: int = 0) -> float:
    """Return a token's number in [0, 1): a function of (seed, sample index, its place) alone.

    ahead: tokens between the request's newest one and the one that is drawn. again: 1 for a second
    draw. Counter-based, so it does not depend on which other requests share the batch.
    """
    block, place = divmod(request.generated + ahead, DRAWS)
    return _draw_block(request.seed & _WORD, request.index, block, again)[place]


@lru_cache(KEPT_BLOCKS)
def _draw_block(seed: int, index: int, block: int, again: int) -> list[float]:
    """Return the numbers of `DRAWS` places: of each counter's four words the first one."""
    generator = np.random.Philox(
        key=np.array([seed, index], np.uint64),
        counter=np.array([block * DRAWS, again, 0, 0], np.uint64),
    )
    words = generator.random_raw(4 * DRAWS)[::4]
    found: list[float] = np.minimum((words >> 11) * 2.0**-53, _BELOW_ONE).tolist()
    return found


def _shapes(spec: ModelSpec, tokens: int, rows: int) -> dict[str, _Shape]:
    """Return dtype and shape of each array of a step of `tokens` rows in `rows` sequences."""
    stride = -(-spec.vocab_size // ROW_ALIGN) * ROW_ALIGN + ROW_ALIGN
    tables = (np.int32, (rows, blocks_for(spec.max_context)))
    single = (np.int32, (rows,))
    more = dict(zip(OUT_ARGS, (single, single, tables), strict=True)) if spec.shared_kv else {}
    states: dict[str, _Shape] = dict.fromkeys(STATE_ARGS, single) if spec.recurrent else {}
    whose = ((np.int32, (tokens,)), single)
    adapters = dict(zip(ADAPTER_ARGS, whose, strict=True)) if spec.adapters else {}
    return {
        **more,
        **adapters,
        **states,
        "token_ids": (np.int32, (tokens,)),
        "positions": (np.int32, (tokens,)),
        "kv_slots": (np.int64, (tokens,)),
        "seq_starts": (np.int32, (rows + 1,)),
        "seq_lengths": (np.int32, (rows,)),
        "block_tables": tables,
        "out_rows": (np.int32, (rows,)),
        "logits": (np.float32, (rows, stride)),
        "temperature": (np.float32, (rows,)),
        "top_k": (np.int32, (rows,)),
        "top_p": (np.float32, (rows,)),
        "min_p": (np.float32, (rows,)),
        "uniform": (np.float32, (rows,)),
        "out_ids": (np.int32, (rows,)),
        "out_logprobs": (np.float32, (rows,)),
    }


def _nbytes(dtype: type[np.generic], shape: tuple[int, ...]) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


_FORWARD_ARRAYS = (
    *("token_ids", "positions", "kv_slots", "seq_starts", "seq_lengths", "block_tables"),
    *("out_rows", "logits"),
)
_PARAMETERS = ("temperature", "top_k", "top_p", "min_p")
_SAMPLE_ARRAYS = ("logits", *_PARAMETERS, "uniform", "out_ids", "out_logprobs")


# ---- parts of keys ----

PART_TOKENS = 64
"""Keys below which a part is not worth its merge, where no schedule says otherwise. Kernels cut no
more, of each sequence by its own length: there is no need to count by the longest."""
LONG_TOKENS = 256
"""Keys from which on a part is worth its merge for the sake of reading heads in one stretch.

Measured with two threads on one Xeon.
"""
EVEN_ITEMS = 4
"""Work items for each thread from which on it matters little that some threads have one more."""


def count_parts(
    sequences: int, n_kv: int, longest: int, threads: int, least: int = PART_TOKENS
) -> int:
    """Return the fewest parts of each sequence that keep all threads equally busy.

    A thread that takes all KV heads of a part reads its blocks from end to end; one that takes some
    skips what lies between, which costs a sixth of the bandwidth with 16 bits. So threads are dealt
    as many neighbouring heads as leave parts long: all, half of them, a quarter, ...

    Args:
        sequences: those that decode.
        n_kv: KV heads.
        longest: tokens of the longest sequence.
        threads: those that share the work.
        least: each sequence has at most one part more than the longest has stretches of so many
            tokens, up to `PART_TOKENS` than it has itself; 0 = sequences stay whole.
    """
    most = MAX_KV_SPLITS if least else 1
    if least > PART_TOKENS:
        most = min(most, 1 + longest // least)
    return _count_parts(sequences, n_kv, most, min(most, longest // LONG_TOKENS), threads)


@lru_cache
def _count_parts(sequences: int, n_kv: int, most: int, most_long: int, threads: int) -> int:
    """Return the parts of sequences that may be cut in `most`, in `most_long` long ones."""
    long = range(1, most_long + 1)
    shares = (n for n in range(1, n_kv) if n_kv % n == 0)  # of a part, by its heads
    found = (_even_parts(sequences * n, long, threads) for n in shares)
    return (
        next(filter(None, found), 0)
        or _even_parts(sequences * n_kv, range(1, most), threads)
        or most
    )


def _even_parts(units: int, choices: Iterable[int], threads: int) -> int:
    """Return the first of `choices` of parts that gives all threads as many, 0 where none does."""
    even = (n for n in choices if units * n % threads == 0 or units * n >= EVEN_ITEMS * threads)
    return next(even, 0)
