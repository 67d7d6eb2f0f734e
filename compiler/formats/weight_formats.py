"""Which format every matrix of a model is stored in, where they are not all alike.

In: a ModelSpec, its checkpoint and what was asked for. Out: the spec with the format of each weight
that is stored otherwise than `weight_dtype`. A quantised file keeps its formats, tensor by tensor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from dovetail.compiler.families.sources import WeightSource
from dovetail.compiler.families.tensors import weight_sources
from dovetail.compiler.files.checkpoint import Checkpoint, TensorInfo
from dovetail.compiler.files.gguf_blocks import FORM_OF_KIND
from dovetail.ir.encoder import Spec
from dovetail.ir.errors import SpecError
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import DENSE, ModelSpec, order_name

WIDEST = "f32"
"""The format that holds the values of any other."""


def stored_format(info: TensorInfo) -> str:
    """Return the format that holds the values of a tensor as they are."""
    if info.kind in FORM_OF_KIND:
        return FORM_OF_KIND[info.kind].name
    if info.kind in FORMATS:
        return info.kind
    return info.dtype.name if info.dtype.name in FORMATS else WIDEST


def main_format(checkpoint: Checkpoint) -> str | None:
    """Return the quantised format that most bytes of a checkpoint have, None where none is."""
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.quantised:
            sizes[stored_format(info)] += info.end - info.start
    return sizes.most_common(1)[0][0] if sizes else None


def keep_formats(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """Return the spec with every matrix in the format that its tensors have.

    q, k and v of several formats become weights of their own; other tensors that make one weight
    and differ are float32 together. Beside packed matrices float16, which is mostly the head's and
    the embedding's, becomes bfloat16, but for routers: float32 would be larger than all else.
    """
    spec = replace(spec, formats=tuple(split_qkv(spec, checkpoint)))
    kept, packed = {}, checkpoint.packs_matrices
    for source in matrices(spec):
        infos, narrow = map(checkpoint.info, source.tensors), packed and not is_router(source)
        found = {"bf16" if narrow and i.dtype.name == "f16" else stored_format(i) for i in infos}
        kept[source.name] = found.pop() if len(found) == 1 else WIDEST
    return with_formats(spec, kept)


HEAD = {"q4_32": ("q6_16k", "q8_32")}
"""Format that was asked for -> those that the head may have instead, by how K is cut: its errors
are those of the logits. llama.cpp gives it as many bits."""
FINER = {"q4_32": ("q8_32",), "q6_16k": ("q8_32",)}
"""Format -> those for a matrix that loses too much in it; then comes float32."""


def is_router(source: WeightSource) -> bool:
    """Return whether a matrix chooses experts, or how fast states fade: errors would add up."""
    return source.name.endswith((".router", ".rates"))


def wanted_format(source: WeightSource, spec: Spec) -> str:
    """Return the format that a matrix is to be quantised in; float32 where K is cut by none.

    So are routers, which are small, and whose errors would send tokens to other experts.
    """
    form = spec.weight_dtype
    if is_router(source):
        return WIDEST
    choices = HEAD.get(form, (form,)) if source.name == "head" else (form,)
    return next((name for name in choices if source.k % FORMATS[name].unit == 0), WIDEST)


def quantise_formats(spec: ModelSpec, form: str) -> ModelSpec:
    """Return the spec with every matrix in blocks of `form`, or float32 where K is cut by none."""
    spec = replace(spec, weight_dtype=form)
    return with_formats(spec, {s.name: wanted_format(s, spec) for s in matrices(spec)})


def matrices(spec: ModelSpec) -> Iterator[WeightSource]:
    """Yield the weights that are matrices of a checkpoint."""
    return (source for source in weight_sources(spec) if source.is_matrix)


def _layout(info: TensorInfo) -> tuple[str, bytes]:
    """Return what matrices of one weight have in common: the format, and the order of K."""
    return stored_format(info), b"" if info.order is None else info.order.tobytes()


def split_orders(spec: ModelSpec, checkpoint: Checkpoint, form: str) -> ModelSpec:
    """Return the spec with q, k and v apart where their codes of `form` have several orders."""

    def order(info: TensorInfo) -> bytes:
        return _layout(info)[1] if stored_format(info) == form else b""

    return replace(spec, formats=tuple(split_qkv(spec, checkpoint, order)))


def split_qkv(
    spec: ModelSpec, checkpoint: Checkpoint, layout: Callable[[TensorInfo], object] = _layout
) -> Iterator[tuple[str, str]]:
    """Yield the parts of q, k, v of the layers where they are of several formats or orders."""
    for source in matrices(spec):
        layer, _, name = source.name.rpartition(".")
        if name != "qkv":
            continue
        tensors = dict.fromkeys(source.tensors)  # q's rows may come in several parts
        infos = [checkpoint.info(tensor) for tensor in tensors]
        if len(set(map(layout, infos))) > 1:
            found = map(stored_format, infos)
            yield from ((f"{layer}.{part}", form) for part, form in zip("qkv", found, strict=True))


def is_copied(info: TensorInfo, form: str, ordered: bool) -> bool:
    """Return whether a weight in `form` has a tensor's codes as they are; else they are new.

    ordered: whether what the weight multiplies is put into the order of K that codes have.
    """
    return info.quantised and stored_format(info) == form and (ordered or info.order is None)


def keep_orders(spec: ModelSpec, checkpoint: Checkpoint, requantise: bool = False) -> ModelSpec:
    """Return the spec with the matrices listed that keep groups of K in an order of their own.

    What they multiply is put into that order first. requantise: what cannot be listed is quantised
    anew; else it is refused, as it would lose by that.
    """
    ordered, known = [], _ORDERED[spec.experts is not None]
    for source in matrices(spec):
        infos = [checkpoint.info(name) for name in source.tensors]
        kept = [i for i in infos if is_copied(i, spec.weight_format(source.name), ordered=True)]
        if all(info.order is None for info in kept):
            continue
        alike, possible = len(set(map(_layout, infos))) == 1, known.fullmatch(source.name)
        if alike and possible:
            ordered.append(source.name)
        elif not requantise:
            fault = (
                f"the matrices of {source.name} have their columns in different group orders "
                "(act-order)"
                if possible
                else f"act-order is not supported for {source.name}"
            )
            raise SpecError(
                f"{infos[0].path}: {fault}; take a checkpoint without it, a GGUF file, or "
                "--weight-dtype int8"
            )
    return replace(spec, ordered=tuple(ordered))


_ATTENTION, _INNER = r"layers\.\d+\.(qkv|[qkvo]|", r"(gate_up|up|down))"
_ORDERED = {
    False: re.compile(f"{_ATTENTION}{_INNER}"),
    True: re.compile(f"{_ATTENTION}{DENSE}{_INNER}"),
}
"""Whether a model has experts, which are multiplied as they come -> names of such matrices."""


def order_tables(spec: ModelSpec, checkpoint: Checkpoint) -> dict[str, npt.NDArray[np.float32]]:
    """Return the orders of K of the weights that have their own, by the names of their tables."""
    orders = {
        source.name: checkpoint.info(source.tensors[0]).order
        for source in matrices(spec)
        if source.name in spec.ordered
    }
    return {
        order_name(name): order.astype(np.float32).reshape(1, -1)
        for name, order in orders.items()
        if order is not None
    }


def with_formats(spec: ModelSpec, kept: Mapping[str, str]) -> ModelSpec:
    """Return the spec with what differs from its main format, and parts of q, k, v, listed.

    A weight whose format changes has new codes, in the order of K that activations have.
    """
    parts = {name for i in range(spec.n_layers) if len(p := spec.qkv_parts(i)) > 1 for name in p}
    listed = {n: form for n, form in kept.items() if form != spec.weight_dtype or n in parts}
    same = tuple(n for n in spec.ordered if kept.get(n) == spec.weight_format(n))
    return replace(spec, formats=tuple(listed.items()), ordered=same)
