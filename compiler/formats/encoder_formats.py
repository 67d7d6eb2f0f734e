"""In which format each matrix of a quantised text encoder is stored: its own, where there is one.

In: an EncoderSpec and its checkpoint. Out: the spec with the formats of what is stored otherwise
than its main format.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from dovetail.compiler.families.encoder_tensors import encoder_sources
from dovetail.compiler.families.sources import WeightSource
from dovetail.compiler.files.checkpoint import Checkpoint, TensorInfo
from dovetail.compiler.formats.weight_formats import split_qkv, stored_format, with_formats
from dovetail.ir.encoder import EncoderSpec

TABLES = dict.fromkeys(("words", "places", "kinds"), "bf16")
"""Tables of quantised encoders: rows are read one by one, and their sum is normed."""


def products(spec: EncoderSpec, checkpoint: Checkpoint) -> Iterator[WeightSource]:
    """Yield the matrices that are multiplied."""
    sources = encoder_sources(spec, checkpoint)
    return (source for source in sources if source.layout.startswith("packed"))


def keep_encoder_formats(spec: EncoderSpec, checkpoint: Checkpoint) -> EncoderSpec:
    """Return the spec with every matrix in the format that its tensors have.

    What makes one weight of several formats is bfloat16, which is finer than any of blocks, and so
    are float16 and act-order; of decoders q, k and v become weights of their own.
    """
    if spec.decoder:
        parted = replace(spec.decoder, formats=tuple(split_qkv(spec.decoder, checkpoint)))
        spec = replace(spec, decoder=parted)
    kept = {}
    for source in products(spec, checkpoint):
        forms = {_stored_format(checkpoint.info(name)) for name in source.tensors}
        kept[source.name] = forms.pop() if len(forms) == 1 else "bf16"
    if not spec.decoder:
        return spec.with_formats(TABLES | kept)
    decoder = with_formats(spec.decoder, kept)
    return replace(spec, decoder=decoder, formats=decoder.formats)


def _stored_format(info: TensorInfo) -> str:
    widened = info.dtype.name == "f16" or info.order is not None
    return "bf16" if widened else stored_format(info)


def tell_widened(spec: EncoderSpec, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a note on the matrices whose tensors are quantised and that are stored as floats."""
    names = [
        source.name
        for source in products(spec, checkpoint)
        if spec.weight_format(source.name) == "bf16" != spec.weight_dtype
        and any(checkpoint.info(name).quantised for name in source.tensors)
    ]
    some = ", ".join(names[:4]) + ", .." * (len(names) > 4)
    said = (
        f"{len(names)} matrices of several formats, or of act-order, are stored as bfloat16: {some}"
    )
    return (said,) if names else ()
