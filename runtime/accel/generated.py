"""Products of few rows by generated kernels, where these were measured to be faster than torch's.

In: an artifact compiled with `--target cuda`, and a model's weights. Out: `GeneratedProducts`: for
each weight and number of rows in `ROWS` the program that `polymerize.py` put together for the shape
and this GPU, if a comparison, kept in the artifact, found it faster; nothing before `choose`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import TypeAlias
from uuid import uuid4

import msgspec
import numpy as np
import torch

from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import install
from dovetail.ir.files import read_json
from dovetail.ir.formats import FORMATS, is_quantised
from dovetail.ir.model import WeightEntry
from dovetail.runtime.accel.skinny import NAMES, GpuModule, Tensor, gemm_skinny, register_module
from dovetail.runtime.artifact import Artifact, ModelPart, device_module
from dovetail.runtime.native.polymerize import (
    RESIDENT_WARPS,
    CostTable,
    GpuSpec,
    SkinnyPlan,
    assumed_costs,
    assumed_panel_costs,
    plan_skinny,
)
from dovetail.runtime.native.weights import Weights

ROWS = (1, 2, 4, 8, 16, 32, 64)
GAIN = 0.97
"""Share of the time of torch's product below which a program is taken."""
LEAST_CALLS, ROUNDS = 16, 5
"""Products that are timed together, those of all layers in turn; how often they are."""
MAX_BYTES = 1 << 20

Shape: TypeAlias = tuple[int, int, str]
"""Columns of C, steps of K, and the format of the weights."""
Key: TypeAlias = tuple[Shape, int]
"""A shape and a number of rows."""
Own: TypeAlias = Callable[[str, Tensor], Tensor]
"""Torch's own product of rows with a weight by name, without its bias."""
Multiply: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]
"""A product of rows [rows][K], plus a bias [n] of their type or None."""
Work: TypeAlias = Callable[[], object]
Compare: TypeAlias = Callable[[Work, Work], float]
"""Returns the first one's time as a share of the second one's."""

log = logging.getLogger("dovetail")


@dataclass(frozen=True, slots=True)
class Operand:
    """A weight [n][k]; form, stride, halves as of `gemm_skinny`; put: copies it to the device."""

    n: int
    k: int
    form: str
    stride: int
    halves: int
    put: Callable[[], Tensor]

    @property
    def shape(self) -> Shape:
        """What it has in common with those of other layers."""
        return self.n, self.k, self.form if self.halves == 1 else f"{self.form} in halves"


@dataclass(frozen=True, slots=True)
class Program:
    """A plan on the device."""

    regions: Tensor
    splits: int
    warps: int


class GeneratedProducts:
    """The generated products of one model on one device."""

    def __init__(
        self,
        module: GpuModule,
        rates: GpuSpec,
        operands: Mapping[str, Operand],
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """dtype: of the rows. folder: where choices are kept."""
        self._module, self._name, self._rates = module, register_module(module), rates
        self._operands, self._folder = operands, folder
        self._device, self._dtype = device, dtype
        self._weights: dict[str, Tensor] = {}
        self.programs: dict[Key, Program] = {}

    @classmethod
    def open(
        cls,
        artifact: Artifact,
        part: ModelPart,
        weights: Weights,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> GeneratedProducts | None:
        """Return those of a model; None where there can be none: no module, no cuda.core, no CUDA.

        tensors: the model's weights by name on the device, matrices [n][k] of `dtype`, those in
            blocks too; what is multiplied is taken from among them.
        """
        if device.type != "cuda" or (found := device_module(artifact)) is None:
            return None
        try:
            module = GpuModule(*found, device)
        except ImportError as error:
            log.info("generated GPU kernels are disabled: %s; %s", error, install("gpu"))
            return None
        operands = find_operands(tensors, weights, device)
        return cls(module, module.rates, operands, part.folder, device, dtype)

    def product(self, name: str, rows: int) -> Multiply | None:
        """Return the product of `rows` rows with a weight; None where torch's is to be used."""
        operand = self._operands.get(name)
        program = self.programs.get((operand.shape, rows)) if operand else None
        if operand is None or program is None:
            return None
        return self._bind(operand, self._weights[name], program)

    def choose(self, own: Own, rows: Iterable[int] = ROWS, compare: Compare | None = None) -> None:
        """Compare programs with torch's products, or take what a load before this one chose.

        The choice is kept in the artifact. Without room on the device all products are torch's.
        """
        plans = self._plans(rows)
        if not plans:
            return
        digests = sorted(kernel.digest for kernel in self._module.kernels.values())
        on = self._device
        name = str(torch.cuda.get_device_name(on)) if on.type == "cuda" else on.type
        about = name, torch.__version__, str(self._dtype), digests, plans
        path = choices_path(self._folder, *about)
        try:
            faster = read_choices(path)
            if faster is None:
                faster = keep_choices(path, self._compare(plans, own, compare or compare_in_graphs))
            self.programs = {key: self._put(plan) for key, plan in plans.items() if key in faster}
            shapes = {shape for shape, _ in self.programs}
            wanted = {name: o for name, o in self._operands.items() if o.shape in shapes}
            self._weights |= {name: o.put() for name, o in wanted.items()}
        except torch.OutOfMemoryError as error:
            log.warning("torch computes all matrix products on %s: %s", self._device, error)
            self.programs, self._weights = {}, {}

    def _plans(self, rows: Iterable[int]) -> dict[Key, SkinnyPlan]:
        """Return a plan for each shape; none for a GPU that does not tell its rates."""
        if not (self._rates.clock and self._rates.bandwidth):
            return {}
        wanted = {operand.shape: operand for operand in self._operands.values()}
        kernels, rows_of = self._module.kernels, NAMES[self._dtype]
        wanted = {s: o for s, o in wanted.items() if f"gemm_skinny_{o.form}_{rows_of}" in kernels}
        return {
            (shape, m): plan_skinny(m, o.n // o.halves, o.k, self._costs(o))
            for shape, o in wanted.items()
            for m in sorted(rows)
        }

    def _costs(self, operand: Operand) -> CostTable:
        if is_quantised(operand.form):
            return assumed_panel_costs(self._rates, FORMATS[operand.form].value_bytes)
        size = DTYPES[operand.form].size
        return assumed_costs(self._rates, size, size)

    def _compare(self, plans: Mapping[Key, SkinnyPlan], own: Own, compare: Compare) -> set[Key]:
        """Return what is faster; nothing stays on the device."""
        faster = set()
        for shape in dict.fromkeys(shape for shape, _ in plans):
            names = [name for name, o in self._operands.items() if o.shape == shape][:LEAST_CALLS]
            weights = {name: self._operands[name].put() for name in names}
            calls = list(islice(cycle(names), LEAST_CALLS))
            for key in (key for key in plans if key[0] == shape):
                x = torch.zeros(key[1], shape[1], dtype=self._dtype, device=self._device)
                program = self._put(plans[key])
                bound = {n: self._bind(self._operands[n], weights[n], program) for n in names}
                ours = partial(_run, [partial(bound[name], x, None) for name in calls])
                theirs = partial(_run, [partial(own, name, x) for name in calls])
                if compare(ours, theirs) < GAIN:
                    faster.add(key)
        return faster

    def _put(self, plan: SkinnyPlan) -> Program:
        regions = torch.from_numpy(plan.table()).to(self._device)
        most = self._rates.multiprocessors * RESIDENT_WARPS
        return Program(regions, plan.splits, min(plan.warps, most))

    def _bind(self, operand: Operand, weight: Tensor, program: Program) -> Multiply:
        sizes = operand.n, operand.stride, operand.halves, program.splits, program.warps
        given = program.regions, *sizes, operand.form, self._name
        return lambda x, bias: gemm_skinny(x, weight, bias, *given)


def find_operands(
    tensors: Mapping[str, Tensor], weights: Weights, device: torch.device
) -> dict[str, Operand]:
    """Return the weights that products have, of a model's tensors [n][k] on the device.

    One in blocks is taken as the artifact has it, where it is whole and K is whole units.
    """
    found = {}
    for name, tensor in tensors.items():
        entry = weights.entries[name]
        if not entry.layout.startswith("packed") or name == "embed":
            continue
        form = FORMATS[entry.dtype]
        whole = tensor.shape == (entry.n, entry.k) and entry.k % form.unit == 0
        if is_quantised(entry.dtype) and whole:
            stride, halves = form.panel_elements(entry.k), 1 + (entry.layout == "packed_pair")
            put = partial(_upload, weights, name, device)
            found[name] = Operand(entry.n, entry.k, entry.dtype, stride, halves, put)
        else:
            found[name] = row_major(tensor)
    return found


def row_major(tensor: Tensor) -> Operand:
    """Return the operand of a weight [n][k] that the device has already."""
    n, k = tensor.shape
    return Operand(n, k, NAMES[tensor.dtype], tensor.stride(0), 1, lambda: tensor)


def panel_bytes(artifact: Artifact, entries: Iterable[WeightEntry], device: torch.device) -> int:
    """Return the bytes of all panels that products may want on the device beside its weights.

    entries: of weights that are no experts'.
    """
    if device.type != "cuda" or device_module(artifact) is None:
        return 0
    return sum(entry.bytes for entry in entries if _in_panels(entry))


def _in_panels(entry: WeightEntry) -> bool:
    if not entry.layout.startswith("packed") or entry.name == "embed":
        return False
    return is_quantised(entry.dtype) and entry.k % FORMATS[entry.dtype].unit == 0


def _upload(weights: Weights, name: str, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(weights.array(name))).to(device)


def _run(calls: Iterable[Work]) -> None:
    for call in calls:
        call()


def compare_in_graphs(ours: Work, theirs: Work) -> float:
    """Time both as CUDA graphs, in turns; return the median of the ratios."""
    graphs = [_record(work) for work in (ours, theirs)]
    ratios = []
    for _ in range(ROUNDS):
        first, second = (_milliseconds(graph.replay) for graph in graphs)
        ratios.append(first / second)
    return median(ratios)


def _record(work: Work) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # libraries take memory in their first run
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _milliseconds(work: Work) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def choices_path(folder: Path, *compared: object) -> Path:
    """Return where the choices between such things are: their `repr` makes the name."""
    digest = hashlib.sha256(repr(compared).encode()).hexdigest()
    return folder / f"gpu_products.{digest[:16]}.json"


def read_choices(path: Path) -> set[Key] | None:
    """Return what an earlier load chose; None where none did, or its file is damaged."""
    try:
        return read_json(path, set[Key], MAX_BYTES)
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("%s: %s; products are compared again", path, error)
        return None


def keep_choices(path: Path, chosen: set[Key]) -> set[Key]:
    """Keep a choice, whole or not at all; return it, or what another load has kept meanwhile.

    A folder that cannot be written to is reported in the log.
    """
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        part.write_bytes(msgspec.json.encode(sorted(chosen)) + b"\n")
        try:
            path.hardlink_to(part)
        except FileExistsError:
            if (found := read_choices(path)) is not None:
                return found
            part.replace(path)  # a damaged one
    except OSError as error:
        log.warning("%s could not be kept (%s): loads may differ in bits", path, error.strerror)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return chosen
