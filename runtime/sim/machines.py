"""Machines that one does not have: documented figures, and the cost tables that follow from them.

In: the name of a machine class and a model's dimensions. Out: a `ProfileFile` of assumed rows by a
roofline: a stage takes the longer of its bytes and its operations, plus a fixed part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import ModelSpec
from dovetail.ir.plans import Figure
from dovetail.ir.profile import CostRow, ProfileFile, ProfileKey

ASSUMED_SPREAD = 0.2
"""Error that rows of the roofline may well have, relative."""
SEQUENCE_SECONDS = 1e-6
"""Assumed cost of each sequence on the CPU: its task, its merge and its row of q and o."""
_LAUNCH = Figure(50e-6, "assumed: event, copy of q, k and v, waking the threads")


@dataclass(frozen=True, slots=True)
class Machine:
    """Accelerators, their host and the link between; flop/s, bytes/s and seconds.

    model, blocks, step_tokens: the setting it is known for (NEO §5.1). accelerators share each
    layer (tensor parallelism); their figures are for one, the host's for all.
    """

    name: str
    model: str
    gpu_blocks: int
    cpu_blocks: int
    step_tokens: int
    flops: Figure
    attention_flops: Figure
    bandwidth: Figure
    link: Figure
    cpu_bandwidth: Figure
    stage: Figure  # kernels of one layer that do no work: starts, reductions, all-reduce
    launch: Figure = _LAUNCH  # host work before a stage of the CPU
    accelerators: int = 1

    def with_cpu(self, times: float) -> Machine:
        """Return the machine with a CPU of another bandwidth."""
        if times == 1:
            return self
        value = self.cpu_bandwidth.value * times
        source = f"{times:g} x: {self.cpu_bandwidth.source}"
        return replace(self, cpu_bandwidth=Figure(value, source))

    def sources(self) -> tuple[str, ...]:
        """Return one line per figure."""
        figures = {n: getattr(self, n) for n in self.__slots__}
        return tuple(
            f"{name} {figure.value:.4g}: {figure.source}"
            for name, figure in figures.items()
            if isinstance(figure, Figure)
        )


MACHINES: dict[str, Machine] = {
    "t4": Machine(
        name="t4",
        model="llama-2-7b",
        gpu_blocks=54,
        cpu_blocks=2500,
        step_tokens=832,
        flops=Figure(25e12, "T4 datasheet: 65 TFLOPS fp16; its 70 W sustain about 0.38 of it"),
        attention_flops=Figure(10e12, "assumed: 0.4 of what products reach, no asynchronous copy"),
        bandwidth=Figure(250e9, "T4 datasheet: 320 GB/s x 0.78"),
        link=Figure(10e9, "PCIe 3.0 x16: 15.75 GB/s each way x 0.64"),
        cpu_bandwidth=Figure(
            60e9, "g4dn.4xlarge: 8 of 24 cores of a Xeon 8259CL, 6 channels DDR4-2933 = 141 GB/s"
        ),
        stage=Figure(30e-6, "assumed: eight kernels at 4 us"),
    ),
    "a10g": Machine(
        name="a10g",
        model="llama-3-8b",
        gpu_blocks=1650,
        cpu_blocks=20000,
        step_tokens=20480,
        flops=Figure(60e12, "NEO §2.2: 125 TFLOPS fp16; 150 W sustain about 0.48 of it"),
        attention_flops=Figure(30e12, "assumed: half of what products reach"),
        bandwidth=Figure(450e9, "NEO §2.2: 600 GB/s x 0.75"),
        link=Figure(20e9, "PCIe 4.0 x16: 31.5 GB/s each way x 0.64"),
        cpu_bandwidth=Figure(
            47e9, "g5.4xlarge: 8 cores of an EPYC 7R32, one die's link of 32 B at 1467 MHz"
        ),
        stage=Figure(25e-6, "assumed: eight kernels at 3 us"),
    ),
    "h100": Machine(
        name="h100",
        model="llama-3-70b",
        accelerators=2,
        gpu_blocks=1900,
        cpu_blocks=40000,
        step_tokens=20480,
        flops=Figure(600e12, "H100 SXM datasheet: 989 TFLOPS dense bf16 x 0.61"),
        attention_flops=Figure(400e12, "assumed: two thirds of what products reach"),
        bandwidth=Figure(2850e9, "H100 SXM datasheet: 3350 GB/s x 0.85"),
        link=Figure(50e9, "PCIe 5.0 x16: 63 GB/s each way x 0.79"),
        cpu_bandwidth=Figure(
            115e9, "NEO §5.1: a quarter of two Xeon 8462Y+, 16 channels DDR5-4800 x 0.75"
        ),
        stage=Figure(40e-6, "assumed: eight kernels at 2 us and two all-reduces at 12 us"),
    ),
    "h200": Machine(
        name="h200",
        model="llama-3-8b",
        gpu_blocks=1650,
        cpu_blocks=20000,
        step_tokens=20480,
        flops=Figure(600e12, "H200 SXM datasheet: 989 TFLOPS dense bf16 x 0.61"),
        attention_flops=Figure(400e12, "assumed: two thirds of what products reach"),
        bandwidth=Figure(4000e9, "H200 SXM datasheet: 4800 GB/s x 0.83"),
        link=Figure(50e9, "PCIe 5.0 x16: 63 GB/s each way x 0.79"),
        cpu_bandwidth=Figure(100e9, "assumed: 16 cores of a server with 8 channels DDR5-4800"),
        stage=Figure(16e-6, "assumed: eight kernels at 2 us"),
    ),
}
"""Machine classes by name: the settings of NEO §5 and an H200 whose KV pool is cut."""


def find_machine(name: str) -> Machine:
    """Return a machine class; SpecError lists the names that are known."""
    if name not in MACHINES:
        raise SpecError(f"unknown machine class {name!r}; choose one of {', '.join(MACHINES)}")
    return MACHINES[name]


def kv_token_bytes(spec: ModelSpec) -> int:
    """Return the bytes of K and V of one token in one layer."""
    return 2 * spec.n_kv_heads * spec.head_dim * DTYPES[spec.kv_dtype].size


def assumed_profile(machine: Machine, spec: ModelSpec) -> ProfileFile:
    """Return the tables of `spec` on `machine` by the roofline; every row says `assumed`."""
    costs = Roofline(machine, spec)
    largest = 1 << 17
    tokens = [*_steps(1, largest, 1), costs.knee]
    return ProfileFile(
        key=ProfileKey(
            model=machine.model,
            device=machine.name,
            threads=0,
            tensor_parallel=machine.accelerators,
            kernels="",
        ),
        created="",
        sources=machine.sources(),
        tables={
            "linear": _rows(costs.linear, tokens),
            "prefill": _rows(costs.prefill, _steps(1, largest, 8)),
            "gpu_decode": _rows(costs.gpu_decode, [1, 1 << 24]),
            "cpu_decode": tuple(
                _row((s, s * each), costs.cpu_decode(s, s * each))
                for s in (1, 1 << 14)
                for each in (1, 1 << 17)
            ),
            "swap": _rows(costs.swap, [1, 1 << 40]),
            "launch": (_row((), machine.launch.value),),
            "head": _rows(costs.head, tokens),
        },
    )


class Roofline:
    """Seconds of each part of a layer from a machine's figures; counts as in `Predictor`."""

    def __init__(self, machine: Machine, spec: ModelSpec) -> None:
        self.machine = machine
        hidden, share = spec.hidden_size, machine.accelerators
        attention = hidden * spec.qkv_size + spec.n_heads * spec.head_dim * hidden
        self._weights = (attention + 3 * hidden * spec.inner_columns()) / share
        self._head = spec.vocab_size * hidden / share
        self._weight_bytes = FORMATS[spec.weight_dtype].value_bytes
        self._kv = kv_token_bytes(spec)
        self._pairs = spec.n_heads * spec.head_dim / share  # of products q x k and p x v

    @property
    def knee(self) -> int:
        """Token rows from which products are bound by operations."""
        machine = self.machine
        return math.ceil(self._weight_bytes * machine.flops.value / machine.bandwidth.value / 2)

    def linear(self, tokens: int) -> float:
        """One layer's projections."""
        return self._product(self._weights, tokens) + self.machine.stage.value

    def head(self, tokens: int) -> float:
        """Logits, and what else lies outside the layers."""
        return self._product(self._head, tokens) + self.machine.stage.value

    def _product(self, weights: float, tokens: int) -> float:
        machine = self.machine
        read = weights * self._weight_bytes / machine.bandwidth.value
        return max(read, 2 * weights * tokens / machine.flops.value)

    def prefill(self, length: int) -> float:
        """Causal attention over a prompt: half of all pairs, two products each."""
        return 2 * self._pairs * length**2 / self.machine.attention_flops.value

    def gpu_decode(self, tokens: int) -> float:
        """Read the stored keys and values once."""
        machine = self.machine
        return tokens * self._kv / machine.accelerators / machine.bandwidth.value

    def cpu_decode(self, sequences: int, tokens: int) -> float:
        """Read them from the host's memory."""
        return sequences * SEQUENCE_SECONDS + tokens * self._kv / self.machine.cpu_bandwidth.value

    def swap(self, nbytes: int) -> float:
        """Copy over the links of all accelerators at once."""
        return nbytes / self.machine.accelerators / self.machine.link.value


def _steps(first: int, last: int, per_octave: int) -> list[int]:
    """Return whole numbers from first to last, so many to each doubling."""
    count = per_octave * round(math.log2(last / first))
    return sorted({round(first * 2 ** (i / per_octave)) for i in range(count + 1)})


def _rows(cost: Callable[[int], float], points: list[int]) -> tuple[CostRow, ...]:
    return tuple(_row((x,), cost(x)) for x in sorted(set(points)))


def _row(at: tuple[int, ...], seconds: float) -> CostRow:
    return CostRow(at=at, seconds=seconds, origin="assumed", spread=ASSUMED_SPREAD)
