"""What `generate.py` is held to: bars on the ratios of its rows. Pure.

In: rows. Out: for each bar the least lower bound over the cells that it covers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from generate_models import SHAPES, WIDTHS

BATCHES = ("decode8", "decode16")
PREFILLS = ("prefill512", "prefill8x512")
ANY = ("llamacpp", "openvino", "vllm")


@dataclass(frozen=True, slots=True)
class Bar:
    """Work, widths and peers of the ratios that are to be at least so much, each of them."""

    least: float
    works: tuple[str, ...]
    widths: tuple[str, ...]
    peers: tuple[str, ...] = ("llamacpp",)

    def covers(self, row: Mapping[str, Any]) -> bool:
        """Tell whether a row is one of them; models of random weights are not."""
        return (
            row["model"] not in SHAPES
            and row["work"] in self.works
            and row["width"] in self.widths
            and row["side"] in self.peers
        )


BARS = {
    "decode_int4_vs_llamacpp": Bar(1.25, ("decode1",), ("Q4_0", "Q4_1")),
    "decode_int4_vs_openvino": Bar(1.8, ("decode1",), ("Q4_0", "Q4_1"), ("openvino",)),
    "decode_int8_vs_llamacpp": Bar(1.25, ("decode1",), ("Q8_0",)),
    "decode_q4km_vs_llamacpp": Bar(1.5, ("decode1",), ("Q4_K_M",)),
    "decode_bf16_vs_llamacpp": Bar(1.05, ("decode1",), ("BF16",)),
    "decode_bf16_vs_vllm": Bar(1.3, ("decode1",), ("BF16",), ("vllm",)),
    "decode_batch_vs_best": Bar(1.5, BATCHES, WIDTHS, ANY),
    "decode_4096_vs_llamacpp": Bar(1.5, ("decode4096",), WIDTHS),
    "prefill_int_vs_best": Bar(1.2, PREFILLS, ("Q4_0", "Q8_0"), ANY),
    "prefill_q4km_vs_llamacpp": Bar(3.0, PREFILLS, ("Q4_K_M",)),
    "prefill_bf16_vs_best": Bar(1.0, PREFILLS, ("BF16",), ANY),
}
READ_SHARE_1B = 0.80
"""Least share of the read bandwidth in which a 1.1B shape of Q4_0 decodes one sequence."""


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the lower bound for each bar; None where nothing was measured, or in too few rounds.

    Also the share of the read bandwidth of the 1.1B shape, and the most that loading took.
    """
    summary: dict[str, float | None] = {}
    for name, bar in BARS.items():
        bounds = [row["bound"] for row in rows if bar.covers(row)]
        summary[name] = min(bounds) if bounds and None not in bounds else None
    ours = [row for row in rows if row["side"] == "dovetail"]
    one = [
        row["read_share"]
        for row in ours
        if (row["model"], row["width"], row["work"]) == ("1b", "Q4_0", "decode1")
    ]
    summary["read_share_1b"] = min(one, default=None)
    summary["load_seconds_max"] = max((row["load_s"] for row in ours), default=None)
    summary["load_memory_max"] = max((row["load_memory"] for row in ours), default=None)
    return summary


def judge(summary: Mapping[str, float | None], *, applies: bool) -> list[str]:
    """Return a line for each bar that has a figure; `applies`: this CPU has AVX-512 VNNI."""
    bars = {name: bar.least for name, bar in BARS.items()} | {"read_share_1b": READ_SHARE_1B}
    lines = [
        "Bars apply to this CPU, which has AVX-512 VNNI:"
        if applies
        else "Bars are for CPUs with AVX-512 VNNI; on this one figures are only recorded:"
    ]
    for name, least in bars.items():
        if (value := summary[name]) is not None:
            verdict = "met" if value >= least else "missed"
            lines.append(f"{name:32} {value:.3f}, bar {least:g}: {verdict}")
    return lines
