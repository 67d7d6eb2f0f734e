"""Options that several verbs share, so that they mean and say the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

ENGINE = "Engine"
"""The panel of options of engines in `--help`."""


def engine_option(name: str, help: str) -> Any:
    """Return an option of engines."""
    return typer.Option(name, help=help, rich_help_panel=ENGINE)


Device = Annotated[
    str,
    engine_option(
        "--device", "auto (an accelerator, else the CPU), cpu, cuda, cuda:1, xpu, npu or torch:cpu."
    ),
]
Offload = Annotated[
    str,
    engine_option(
        "--offload", "A device's requests that the CPU keeps: auto (weighed), off or full (all)."
    ),
]
Dtype = Annotated[
    str,
    engine_option("--dtype", "A device's activations: auto, f32, bf16 or f16."),
]
GpuMemoryUtilization = Annotated[
    float,
    engine_option("--gpu-memory-utilization", "Part of the device's free memory to use."),
]
MaxNumSeqs = Annotated[
    int | None, engine_option("--max-num-seqs", "Sequences of a step at most; default by memory.")
]
MaxNumBatchedTokens = Annotated[
    int | None,
    engine_option("--max-num-batched-tokens", "Tokens of a step at most; default by memory."),
]
MaxModelLen = Annotated[
    int | None,
    engine_option("--max-model-len", "Tokens of a request at most; default the model's."),
]

ModelDirectory = Annotated[Path, typer.Argument(help="A Hugging Face model directory.")]
Database = Annotated[
    Path | None,
    typer.Option(help="Tuning database, default the one in the build cache."),
]
Workload = Annotated[
    Path | None,
    typer.Option(help="A trace of prompt and output lengths, CSV or JSON lines."),
]
Threads = Annotated[int | None, typer.Option(help="Threads, default all cores.")]
WeightDtype = Annotated[
    str,
    typer.Option(
        help="How weights are stored: auto (as quantised; bf16 where the CPU multiplies it, "
        "or where the model has it; else f32), f32, bf16; int8 and int4 quantise."
    ),
]
Calibrate = Annotated[
    Path | None,
    typer.Option(
        metavar="TEXTFILE",
        help="With int8 or int4: a text like those to come; errors count as its activations say.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run the code of an artifact or index that was not made here without a word.",
        envvar="DOVETAIL_TRUST",
    ),
]
KvDtype = Annotated[
    str | None, typer.Option(help="How keys and values are stored: f32, bf16 or f16.")
]
MaxContext = Annotated[
    int | None, typer.Option(help="Positions a request may use, default the model's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Activations = Annotated[
    str,
    typer.Option(help="How they meet quantised weights: integer (rounded to 8 bits) or float."),
]
