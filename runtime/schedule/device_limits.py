"""What a step may hold, chosen when a model is loaded: by options, by memory, by the artifact.

In: free bytes, what weights, KV and activations take, vLLM's options. Out: `DeviceLimits`. A device
divides its memory here; the CPU's tapes were laid out by the compiler, and options only bound them.
Whether models fit at all is `MemoryNeed`s: the arithmetic that a compile and a load show alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.ir.errors import CapacityError, RequestError, SpecError
from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.schedule.kv_pool import blocks_for

STEP_TOKENS, SEQUENCES = 8192, 256
"""Most that a step takes where nothing is asked for: vLLM's."""
SHARE = 16
"""Of what weights leave, one part in so many is for rows of tokens where no number is asked for, so
that memory bounds prompts (NEO §3.2, step 3), and one for rows of logits; never less than a row."""


def check_counts(**counts: int | None) -> None:
    """Raise RequestError for a number that is there and below 1."""
    for name, value in counts.items():
        if value is not None and not (hasattr(value, "__index__") and value >= 1):
            raise RequestError(f"{name} must be at least 1, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Options with vLLM's names and meaning; None leaves the choice to what is there."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        """Raise RequestError for what no step can hold."""
        sequences, tokens = self.max_num_seqs, self.max_num_batched_tokens
        check_counts(
            max_num_seqs=sequences, max_num_batched_tokens=tokens, max_model_len=self.max_model_len
        )
        if sequences is not None and tokens is not None and tokens < sequences:
            raise RequestError(
                f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({sequences}): "
                "each sequence has a token in a step"
            )

    def bound_context(self, context: int) -> int:
        """Return the context of a model of so much; SpecError where more is asked for."""
        return _bound("max_model_len", self.max_model_len, context, "--max-context")

    def bound(self, tokens: int, sequences: int, context: int) -> DeviceLimits:
        """Return limits within those of an artifact's tapes; SpecError where more is asked for."""
        tokens = _bound(
            "max_num_batched_tokens", self.max_num_batched_tokens, tokens, "max_step_tokens"
        )
        sequences = _bound("max_num_seqs", self.max_num_seqs, sequences, "max_step_sequences")
        return DeviceLimits(
            step_tokens=tokens,
            sequences=min(sequences, tokens),
            context=self.bound_context(context),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """Tokens and sequences of a step, tokens of a request, KV blocks of a device's pool.

    room: bytes of the device that KV may take, of which hot clusters may have a part. landing:
    blocks behind the pool's, in which KV of the CPU's prompts is computed.
    """

    step_tokens: int
    sequences: int
    context: int
    blocks: int = 0
    room: int = 0
    landing: int = 0


ANY = LimitOptions()
"""Nothing is asked for."""


def device_limits(
    *,
    free: int,
    weights: int,
    block_bytes: int,
    row_bytes: int,
    logits_bytes: int,
    context: int,
    asked: LimitOptions = ANY,
    utilization: float = 0.9,
    blocks: int | None = None,
) -> DeviceLimits:
    """Divide a device's memory between weights, activations and KV.

    What is asked for is kept or refused. With more memory nothing that is chosen becomes less. KV
    gets all that is left, as far as a full step of full contexts can use it.

    Args:
        free: bytes of the device that are free before anything of the model is there.
        weights: bytes that weights will take, and all else that is the same for any step.
        block_bytes: of a KV block in all layers, K and V.
        row_bytes: of the activations of one token of a step.
        logits_bytes: of one row of logits, with what choosing its token takes.
        context: tokens that the model may see.
        asked: what the user wants.
        utilization: part of `free` to use.
        blocks: KV blocks, instead of what is left.

    Raises:
        CapacityError: there is no room for what is asked for, or not for one block and one token.
        SpecError: a longer context is asked for than the model has.
    """
    context = asked.bound_context(context)
    usable = int(free * utilization)
    left = (usable - weights) // SHARE * SHARE
    share, fewest = left // SHARE, asked.max_num_seqs or 1
    tokens, for_tokens = _choose(
        asked.max_num_batched_tokens, share, row_bytes, fewest, STEP_TOKENS
    )
    sequences, for_logits = _choose(asked.max_num_seqs, share, logits_bytes, 1, SEQUENCES)
    room = left - for_tokens - for_logits
    least = blocks or 1
    if room // block_bytes < least:
        raise CapacityError(
            f"{usable} bytes of the device may be used, but weights take {weights}, a step of "
            f"{tokens} tokens {for_tokens}, {sequences} rows of logits {for_logits} and {least} "
            f"blocks of KV {least * block_bytes}; lower max_num_batched_tokens, max_num_seqs or "
            "gpu_blocks, raise gpu_memory_utilization, or use device cpu"
        )
    sequences = min(sequences, tokens)
    return DeviceLimits(
        step_tokens=tokens,
        sequences=sequences,
        context=context,
        blocks=blocks or min(room // block_bytes, sequences * blocks_for(context)),
        room=room,
    )


def _choose(
    asked: int | None, share: int, row_bytes: int, least: int, most: int
) -> tuple[int, int]:
    """Return how many rows there are to be, and the bytes that are kept for them.

    These are the whole share: so more memory is never less room for KV because a row more fits.
    """
    if asked is not None:
        return asked, asked * row_bytes
    kept = max(least * row_bytes, min(share, most * row_bytes))
    return kept // row_bytes, kept


def _bound(name: str, asked: int | None, most: int, option: str) -> int:
    """Return what is asked for, else `most`; SpecError where that is less."""
    if asked is not None and asked > most:
        raise SpecError(
            f"{name} {asked} is more than the artifact was compiled for ({most}); lower it, or "
            f"compile with {option} {asked}"
        )
    return asked or most


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes that a model needs with KV of `context` tokens: those of one request, or of its pool.

    block: of K and V of KV_BLOCK tokens, 0 where none is kept.
    """

    weights: int
    block: int
    activations: int
    context: int

    @property
    def fixed(self) -> int:
        """Bytes whatever the context is."""
        return self.weights + self.activations

    @property
    def total(self) -> int:
        """Bytes with KV of the whole context."""
        return self.fixed + blocks_for(self.context) * self.block

    def longest(self, memory: int) -> int:
        """Return the most tokens of a context that fit into `memory` bytes; 0 where none does."""
        return max(0, (memory - self.fixed) // self.block * KV_BLOCK)

    def explain(self, memory: int) -> str:
        """Return the sum, and what is there."""
        return _explain(self.terms, self.total, memory)

    @property
    def terms(self) -> str:
        """What is added up, in GiB."""
        kv = f"{_gib(self.total - self.fixed)} of KV for {self.context} tokens + "
        return (
            f"{_gib(self.weights)} of weights + {kv * bool(self.block)}"
            f"{_gib(self.activations)} of activations"
        )


def check_together(needs: Mapping[str, MemoryNeed], memory: int) -> None:
    """Raise CapacityError where models, by their names, do not fit into memory all together."""
    total = sum(need.total for need in needs.values())
    if total > memory:
        terms = " + ".join(f"{name} ({need.terms})" for name, need in needs.items())
        which = "the models do not fit together" if len(needs) > 1 else "the model does not fit"
        raise CapacityError(
            f"{which} into the memory that is free: {_explain(terms, total, memory)}; lower "
            "max_model_len or kv_blocks, free some, use fewer models, or compile with a narrower "
            "--weight-dtype, such as int4"
        )


def _explain(terms: str, total: int, memory: int) -> str:
    return f"{terms} = {_gib(total)} GiB, where there are {_gib(memory)} GiB"


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f}"
