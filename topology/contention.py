"""The contention model: how long a configuration takes for a step of a model (Sandwich §3.3).

In: a HardwareSpec, MachineParameters, a ModelSpec. Out: the seconds of a decode step and of a
prefill, in parts. A step is as slow as its slowest resource (`dovetail.topology.resources`), and
pays for what its threads and processes tell each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log2

from dovetail.ir.dtypes import DTYPES
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import ModelSpec, latent_shapes
from dovetail.topology.configuration import Configuration
from dovetail.topology.parameters import MachineParameters
from dovetail.topology.resources import MachineModel, Profile, join_times
from dovetail.topology.values import HardwareSpec

LINE = 64
ACTIVATION_BYTES = 4  # activations are float32
BARRIERS_PER_LAYER = 6
OVERLAP = 10
"""Rows whose shared lines are fetched in the time of one."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step by cause; `work` is computing and memory, whichever takes longer."""

    work: float
    coherence: float
    all_reduce: float
    barriers: float
    preemption: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.work + self.coherence + self.all_reduce + self.barriers + self.preemption


class Simulator:
    """Predicts step times of one model on one machine; remembers the profile of each plan.

    elements: of the matrices that a token is multiplied with. weights: bytes of all. kv_row: bytes
    of K and V that a token has.
    """

    def __init__(self, spec: HardwareSpec, parameters: MachineParameters, model: ModelSpec) -> None:
        self.parameters = parameters
        self.model = model
        self._machine = MachineModel(spec, parameters)
        self._profiles: dict[Configuration, Profile] = {}
        self.elements = matrix_elements(model)
        self.weights = self.read(inf)
        values = model.pools * sum(map(model.kv_values, range(model.n_layers)))
        self.kv_row = values * DTYPES[model.kv_dtype].size

    def read(self, rows: float) -> int:
        """Return the bytes of weights that a step of so many rows reads: of experts at most."""
        stored = FORMATS[self.model.weight_dtype].value_bytes
        return round(matrix_elements(self.model, rows) * stored)

    def decode(self, configuration: Configuration, *, batch: int, context: float) -> StepCost:
        """Return the cost of one token for each of `batch` sequences of `context` tokens."""
        read = self.read(batch) + batch * context * self.kv_row
        attention = 4 * batch * context * self.model.n_heads * self.model.head_dim
        flops = 2 * batch * self.elements + attention * self.model.n_layers
        return self._cost(configuration, batch, read, flops)

    def prefill(self, configuration: Configuration, *, tokens: int) -> StepCost:
        """Return the cost of a prompt of `tokens`, in one step."""
        attention = 2 * tokens * tokens * self.model.n_heads * self.model.head_dim
        flops = 2 * tokens * self.elements + attention * self.model.n_layers
        return self._cost(configuration, tokens, self.read(tokens) + tokens * self.kv_row, flops)

    def _cost(self, configuration: Configuration, rows: int, read: float, flops: float) -> StepCost:
        profile = self._profiles.get(configuration)
        if profile is None:
            profile = self._profiles[configuration] = self._machine.profile(configuration)
        figures, layers = self.parameters, self.model.n_layers
        barriers = layers * BARRIERS_PER_LAYER
        per_flop = profile.seconds_per_flop / figures.share(rows)
        work = join_times((read * profile.seconds_per_byte, flops * per_flop))
        return StepCost(
            work=work,
            coherence=self._coherence(profile, rows),
            all_reduce=2 * layers * self._all_reduce(profile.processes, rows),
            barriers=barriers * figures.barrier.value * log2(max(2, profile.largest_team)),
            preemption=barriers * self._wait(work / barriers) * profile.preemption,
        )

    def _coherence(self, profile: Profile, rows: int) -> float:
        """Every L3 group of a process fetches each operator's input from the one that made it.

        The same few lines are wanted by all at once and are served in turn; with many rows a group
        has rows of its own, and fetches overlap.
        """
        model = self.model
        inner = (model.inner_columns() + model.n_heads * model.head_dim) / profile.processes
        lines = (2 * model.hidden_size + inner) * ACTIVATION_BYTES / LINE * model.n_layers
        repeated = max(1.0, rows / (OVERLAP * profile.l3_groups))
        return lines * (profile.l3_groups - 1) * repeated * self.parameters.line_transfer.value

    def _wait(self, work: float) -> float:
        """Return the seconds a team waits at a barrier for a thread the system put aside.

        Of an operator that lasts longer than a time slice the others take over the rest meanwhile.
        """
        time_slice = self.parameters.time_slice.value
        return float(time_slice * (time_slice / (time_slice + work)) ** 2)

    def _all_reduce(self, ranks: int, rows: int) -> float:
        """Rank-shifted through shared memory (§7.2): 2(p-1) steps, each sees p ranks' flags."""
        if ranks == 1:
            return 0.0
        chunk = rows * self.model.hidden_size * ACTIVATION_BYTES / ranks
        step = ranks * self.parameters.rank_step.value
        return 2 * (ranks - 1) * (step + chunk / self.parameters.all_reduce_bandwidth.value)


def matrix_elements(model: ModelSpec, rows: float = 1) -> float:
    """Return the elements of the weights that so many tokens are multiplied with, at most."""
    attention = model.hidden_size * (model.qkv_size + model.n_heads * model.head_dim)
    if model.latent:
        attention = sum(n * k for n, k in latent_shapes(model, model.latent).values())
    matrices = 3 if model.gated else 2
    layer = attention + matrices * model.hidden_size * model.inner_columns(rows)
    return model.n_layers * layer + model.vocab_size * model.hidden_size
