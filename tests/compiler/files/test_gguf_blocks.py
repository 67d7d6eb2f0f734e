"""Blocks of GGUF files become our own without a second rounding, most no larger."""

import gguf
import numpy as np
import pytest

from dovetail.compiler.files.gguf_blocks import FORM_OF_KIND, read_blocks

SCALES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2)}
SCALES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "IQ4_NL": (0,)}
SCALES |= {"Q2_K": (80, 82), "IQ4_XS": (0,), "MXFP4": ()}
WIDER = {"Q3_K": 1.97, "Q2_K": 1.96, "MXFP4": 1.01}
"""Their codes stand for values that take more bits."""


@pytest.mark.parametrize("kind", FORM_OF_KIND)
def test_values_are_those_of_the_file(kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(3)
    stored = rng.integers(0, 256, (21, 3, size), dtype=np.uint8)
    for at in SCALES[kind]:  # of which any other bytes may be no number
        finite = rng.standard_normal((21, 3, 1)).astype(np.float16)
        stored[:, :, at : at + 2] = finite.view(np.uint8).reshape(21, 3, 2)
    if kind == "MXFP4":  # exponents of a byte, as far as float16 goes
        stored[:, :, 0] = rng.integers(104, 144, (21, 3))
    stored = stored.reshape(21, -1)
    form, blocks = FORM_OF_KIND[kind], read_blocks(kind, stored)
    wanted = gguf.quants.dequantize(stored, type_)
    assert np.array_equal(form.values(blocks), wanted)
    packed = form.pack(read_blocks(kind, stored[:16]))
    assert np.array_equal(form.unpack(packed, 16, 3 * values), wanted[:16])
    assert packed.nbytes <= 1.05 * WIDER.get(kind, 1) * stored[:16].nbytes


def test_exponents_beyond_float16() -> None:
    stored = np.full((1, 3, 17), 0x77, np.uint8)  # 12 in each place
    stored[0, :, 0] = 0, 103, 144
    scales = read_blocks("MXFP4", stored.reshape(1, -1)).scales
    assert scales.tolist() == [[0.0, 0.0, np.inf]]  # the last is refused
