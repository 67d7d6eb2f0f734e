"""One plan of the CPU: which cores each worker keeps, and which it borrows from idle ones.

In: what the stages of a load compute and read in a second, a machine. Out: a DivisionPlan: all
divisions that were priced, the best one first. `lend` says who runs where at a time, from shares
and who is busy: every worker evaluates it for itself.

The engine has two stages, prefill and decode (with an accelerator: attention on the CPU), one at a
time. Shares of different workers are disjoint or equal; equal where there are too few cores.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, combinations, pairwise

from dovetail.ir.plans import Figure
from dovetail.topology.binding import choose_pus
from dovetail.topology.parameters import MachineParameters, default_parameters
from dovetail.topology.resources import MachineModel, join_times
from dovetail.topology.values import HardwareSpec

PREFILL, DECODE, SEARCHES, ENCODERS = STAGES = ("prefill", "decode", "searches", "encoders")
ENGINE = (PREFILL, DECODE)
Shares = Mapping[str, tuple[int, ...]]
"""Stage -> PUs."""

OVERSUBSCRIBED = Figure(0.15, "assumed: barriers of a team wait for threads that others displaced")
"""Further part of the time that a team takes on cores which others use at the same time."""
MOST_CUTS = 16
"""Cores in a unit of a share are as many as give no more units than that."""
LEAST_LOAD, WORTH = 0.02, 0.1
"""Cores that a worker keeps busy to count when the load has changed; part of the busiest worker's
time that new shares save, else the old ones stay."""
LOOKS, REST = 2, 5.0
"""Looks in a row for which other shares are better before they are given; seconds that they stay
at most."""
NOISE, KNOWN = WORTH / 2, 32
"""By how much of itself the work of each stage may differ in loads that are taken for the same; how
many loads are kept for which the shares that hold are good. Prices are proportional to the work, so
what other shares would save changes by twice as much at most."""
MOVED = Figure(0.01, "assumed: caches filled anew, and a step that waits for who has moved")
"""Seconds that each core costs which changes hands."""
ENOUGH = 0.02
"""Decode leaves cores that make it faster by no more than this part."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a stage computes (flop) and reads (bytes) for each second of the load."""

    flops: float
    read: float


Demands = Mapping[str, Demand]


@dataclass(frozen=True, slots=True)
class Division:
    """Shares and their price: `seconds` of work for each second of the load.

    That is with idle shares lent; one or less can be sustained. alone: of each stage on its share
    while all other workers are busy.
    """

    shares: Shares
    seconds: float
    alone: Mapping[str, float]

    @property
    def busiest(self) -> float:
        """Seconds of the worker that has most to do, were nothing lent."""
        engine = sum(self.alone.get(stage, 0.0) for stage in ENGINE)
        return max(engine, *(self.alone.get(s, 0.0) for s in STAGES if s not in ENGINE))


@dataclass(frozen=True, slots=True)
class DivisionPlan:
    """Divisions by price, the chosen one first; `everyone`: the price of all cores for all."""

    divisions: tuple[Division, ...]
    everyone: float

    @property
    def shares(self) -> Shares:
        """Those of the best division."""
        return self.divisions[0].shares


# ---- who runs where at a time ----


def worker_of(stage: str) -> str:
    """Return the worker that runs a stage."""
    return "engine" if stage in ENGINE else stage


def busy_workers(seen: Mapping[str, float], period: float) -> set[str]:
    """Return the workers that count in a period, by the core-seconds that each stage has worked."""
    return {worker_of(stage) for stage, worked in seen.items() if worked > LEAST_LOAD * period}


def lend(shares: Shares, busy: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return the PUs that each busy stage has now: its share, and a part of what is idle.

    Of stages with equal shares one keeps them where idle PUs are left for the others. What is idle
    then is dealt to all in equal runs, so that each PU has one worker whenever that is possible.
    """
    now = {stage: tuple(shares[stage]) for stage in shares if stage in busy}
    held = {pu for cpus in now.values() for pu in cpus}
    idle = [pu for pu in dict.fromkeys(pu for cpus in shares.values() for pu in cpus)
            if pu not in held]  # fmt: skip
    crowded = [stage for place, stage in enumerate(now) if now[stage] in list(now.values())[:place]]
    for place, stage in enumerate(crowded):
        taken = _part(idle, place, len(crowded))
        now[stage] = taken or now[stage]
    if crowded:
        return now
    return {
        stage: (*cpus, *_part(idle, place, len(now)))
        for place, (stage, cpus) in enumerate(now.items())
    }


def _part(pus: Sequence[int], place: int, parts: int) -> tuple[int, ...]:
    """Return the `place`-th of so many nearly equal runs; the first ones are the longer."""
    size, more = divmod(len(pus), parts)
    first = place * size + min(place, more)
    return tuple(pus[first : first + size + (place < more)])


def show_shares(shares: Shares) -> str:
    """Return how many cores each stage keeps, in words; `=` before those of an earlier one."""
    told: list[str] = []
    for place, (stage, cpus) in enumerate(shares.items()):
        same = set(cpus) in [set(other) for other in list(shares.values())[:place]]
        told.append(f"{stage} {'=' * same}{len(cpus)}")
    return ", ".join(told)


# ---- what a division costs ----


class Prices:
    """The contention model of several workers on one machine. Simulated."""

    def __init__(self, spec: HardwareSpec, parameters: MachineParameters, demands: Demands) -> None:
        """`demands`: of the stages that there are."""
        self.demands = demands
        self._figures = parameters
        self._rates = MachineModel(spec, parameters).node_rates
        self._node = {pu.core: pu.node for pu in spec.pus}
        self._core = {pu.id: pu.core for pu in spec.pus}
        self._draws = {stage: self._draw(demand) for stage, demand in demands.items()}
        self._spots: dict[tuple[int, ...], tuple[frozenset[int], Mapping[int, float]]] = {}

    def price(self, shares: Shares) -> Division:
        """Return a division with what it costs."""
        return Division(shares, self.makespan(shares), self.alone(shares))

    def alone(self, shares: Shares) -> dict[str, float]:
        """Return what each stage takes for a second of the load while the other workers work."""
        found: dict[str, float] = {}
        for stage in ENGINE:
            places = {s: cpus for s, cpus in shares.items() if s == stage or s not in ENGINE}
            for name, seconds in self.seconds(places).items():
                found[name] = max(seconds, found.get(name, 0.0))
        return found

    def seconds(self, places: Shares) -> dict[str, float]:
        """Return what each stage of `places` takes for a second of the load, all working at once.

        Cores that several have go to each in turn. A node's bandwidth is dealt by what its readers
        would draw.
        """
        spots = {stage: self._spot(cpus) for stage, cpus in places.items()}
        owners = Counter(chain.from_iterable(cores for cores, _ in spots.values()))
        alone = len(owners) == sum(len(cores) for cores, _ in spots.values())
        wanted: dict[int, float] = defaultdict(float)
        cores = {
            stage: nodes if alone else self._by_node(own, owners)
            for stage, (own, nodes) in spots.items()
        }
        for stage, nodes in cores.items():
            for node, count in nodes.items():
                wanted[node] += count * self._draws[stage]
        found = {}
        for stage, nodes in cores.items():
            demand, flop_rate = self.demands[stage], self._figures.core_flops.value
            rate = sum(
                count * self._draws[stage] * min(1.0, self._rates[node] / max(1.0, wanted[node]))
                for node, count in nodes.items()
            )
            whole = sum(nodes.values())
            compute = demand.flops / (whole * flop_rate)
            took = join_times((compute, demand.read / rate if rate else 0.0))
            shared = not alone and whole < len(spots[stage][0])
            found[stage] = took * (1 + OVERSUBSCRIBED.value * shared)
        return found

    def _draw(self, demand: Demand) -> float:
        """Return the bytes/s that a core reads for a demand where nothing holds it up."""
        figures = self._figures
        if not demand.flops:
            return figures.core_bandwidth.value
        ratio = demand.read / demand.flops
        return min(figures.core_bandwidth.value, ratio * figures.core_flops.value)

    def _spot(self, cpus: tuple[int, ...]) -> tuple[frozenset[int], Mapping[int, float]]:
        """Return the cores of PUs, and how many of them each node has."""
        if cpus not in self._spots:
            cores = frozenset(self._core[pu] for pu in cpus)
            self._spots[cpus] = cores, self._by_node(cores, dict.fromkeys(cores, 1))
        return self._spots[cpus]

    def _by_node(self, cores: Collection[int], owners: Mapping[int, int]) -> dict[int, float]:
        """Return node -> the cores' worth of these there."""
        found: dict[int, float] = defaultdict(float)
        for core in cores:
            found[self._node[core]] += 1 / owners[core]
        return found

    def makespan(self, shares: Shares) -> float:
        """Return the seconds until a second's load is done, idle shares being lent meanwhile.

        The engine prefills, then decodes; the others begin with it.
        """
        left = {s: 1.0 for s in STAGES if s in self.demands}
        total = 0.0
        while left:
            running = {worker_of(s): s for s in reversed(list(left))}.values()
            took = self.seconds(lend(shares, running))
            step = min(took[s] * left[s] for s in running)
            total += step
            for stage in tuple(running):
                left[stage] -= step / took[stage] if took[stage] else left[stage]
                if left[stage] <= 1e-9:
                    del left[stage]
        return total


# ---- the search ----


def divide(spec: HardwareSpec, parameters: MachineParameters, demands: Demands) -> DivisionPlan:
    """Return the divisions of a machine's allowed PUs among the workers of a load, priced.

    Each core is in one share, or in the equal shares of workers that take turns. A share lies side
    by side, in one memory node if it fits into one, or has cores of all nodes in turn. All cores
    for everyone is the division in which all workers take turns.
    """
    prices = Prices(spec, parameters, demands)
    workers = list(dict.fromkeys(map(worker_of, (s for s in STAGES if s in demands))))
    cores = _ordered_cores(spec)
    everyone = {stage: _flat(cores) for stage in STAGES if stage in demands}
    price = prices.makespan(everyone)
    blocks = _blocks(workers, cores, spec)
    found = [prices.price(_share_out(each, prices)) for each in blocks]
    least = min(division.seconds for division in found) * (1 + ENOUGH)
    found.sort(key=lambda d: (max(d.seconds, least), d.busiest, d.seconds))
    return DivisionPlan(tuple(found), price)


def redivide(
    spec: HardwareSpec,
    shares: Shares,
    seen: Mapping[str, float],
    period: float,
    figures: MachineParameters | None = None,
) -> Shares | None:
    """Return shares that serve the load of a period better than `shares`, None where none do.

    seen: core-seconds that each stage has worked. Decode and searches are taken to read all the
    time, prefill and encoders to compute. figures: of the machine, by default those of its class.
    """
    figures = figures or default_parameters(spec)
    flops, read = figures.core_flops.value / period, figures.core_bandwidth.value / period
    demands = {
        stage: Demand(0.0, worked * read)
        if stage in (DECODE, SEARCHES)
        else Demand(worked * flops, 0.0)
        for stage, worked in seen.items()
    }
    if len(busy_workers(seen, period)) < 2 or demands.keys() != shares.keys():
        return None
    now = Prices(spec, figures, demands).price(shares)
    best = divide(spec, figures, demands).divisions[0]
    moved = {cpu for stage in shares for cpu in {*shares[stage]} ^ {*best.shares[stage]}}
    least = max(now.busiest * WORTH, len(moved) * MOVED.value / REST)
    return best.shares if now.busiest - best.busiest > least else None


@dataclass(frozen=True, slots=True)
class Trend:
    """For how long other shares than those that hold have been better.

    looks: at the load that found so, in a row. worked: core-seconds of each stage meanwhile.
    period: seconds of these looks. until: the time before which the shares that hold stay. rest:
    seconds for which they were given to stay. good: loads that these shares serve as well as
    others, each as the cores that every stage keeps busy.
    """

    looks: int = 0
    worked: Mapping[str, float] = field(default_factory=dict)
    period: float = 0.0
    until: float = -REST
    rest: float = 0.0
    good: tuple[Mapping[str, float], ...] = ()


def follow_trend(
    spec: HardwareSpec,
    shares: Shares,
    trend: Trend,
    seen: Mapping[str, float],
    period: float,
    now: float,
    figures: MachineParameters | None = None,
) -> tuple[Trend, Shares | None]:
    """Look at the load of a period that ends now; return the shares to give, None = those there.

    Other shares have to be better in LOOKS looks in a row, and for all of them together. Those that
    come soon after others stay for longer than these, REST seconds in the end: so a change of the
    load is followed at once, but a load that swings does not drag the cores with it. A load like
    one that these shares were found good for is not priced again, which takes long.
    """
    still = Trend(until=trend.until, rest=trend.rest, good=trend.good)
    load = {stage: worked / period for stage, worked in seen.items()}
    if (
        now < trend.until
        or len(busy_workers(seen, period)) < 2
        or any(_alike(load, known) for known in trend.good)
    ):
        return still, None
    if redivide(spec, shares, seen, period, figures) is None:
        return replace(still, good=(*trend.good[1 - KNOWN :], load)), None
    worked = {stage: seconds + trend.worked.get(stage, 0.0) for stage, seconds in seen.items()}
    trend = replace(trend, looks=trend.looks + 1, worked=worked, period=trend.period + period)
    better = None
    if trend.looks >= LOOKS:
        better = redivide(spec, shares, worked, trend.period, figures)
    if better is None:
        return trend, None
    rest = min(REST, 2 * trend.rest + 1) if now < trend.until + REST else 0.0
    return Trend(until=now + rest, rest=rest), better


def _alike(load: Mapping[str, float], known: Mapping[str, float]) -> bool:
    """Tell whether two loads, in busy cores by stage, differ by no more than NOISE."""
    return all(
        abs(cores - known.get(stage, 0.0)) <= max(LEAST_LOAD, NOISE * known.get(stage, 0.0))
        for stage, cores in load.items()
    )


def _share_out(blocks: Mapping[str, Sequence[tuple[int, ...]]], prices: Prices) -> Shares:
    """Return the share of each stage; decode leaves cores of the engine's that it gains nothing by.

    blocks: worker -> its cores, each as its PUs.
    """
    shares = {s: _flat(blocks[worker_of(s)]) for s in STAGES if s in prices.demands}
    engine = blocks.get("engine", ())
    if DECODE in shares and all(engine is not own for w, own in blocks.items() if w != "engine"):
        whole = prices.seconds({DECODE: shares[DECODE]})[DECODE]
        counts = sorted({max(1, len(engine) * part // 8) for part in range(1, 9)})
        for count in counts:
            part = _flat(engine[:count])
            if prices.seconds({DECODE: part})[DECODE] <= whole * (1 + ENOUGH):
                shares[DECODE] = part
                break
    return shares


def _blocks(
    workers: Sequence[str], cores: Sequence[tuple[int, ...]], spec: HardwareSpec
) -> Iterator[dict[str, Sequence[tuple[int, ...]]]]:
    """Yield worker -> cores for all ways to group workers and to cut the cores for the groups."""
    home = {pu.id: pu.node for pu in spec.pus}
    by_node: dict[int, list[tuple[int, ...]]] = {}
    for core in cores:
        by_node.setdefault(home[core[0]], []).append(core)
    unit = -(-len(cores) // MOST_CUTS)
    for groups in _partitions(list(workers)):
        for cuts in combinations(range(unit, len(cores), unit), len(groups) - 1):
            ends = (0, *cuts, len(cores))
            sizes = [b - a for a, b in pairwise(ends)]
            for deal in (_side_by_side, _over_nodes) if len(by_node) > 1 else (_side_by_side,):
                blocks = deal(list(by_node.values()), sizes)
                if blocks is not None:
                    yield {w: block for group, block in zip(groups, blocks, strict=True)
                           for w in group}  # fmt: skip


def _side_by_side(
    nodes: Sequence[Sequence[tuple[int, ...]]], sizes: Sequence[int]
) -> list[Sequence[tuple[int, ...]]] | None:
    """Return runs of cores of these sizes, the largest first; None where one is cut by an edge.

    That is, it lies in two memory nodes and would fit into either.
    """
    flat = [core for node in nodes for core in node]
    where = [(number, len(node)) for number, node in enumerate(nodes) for _ in node]
    found: dict[int, Sequence[tuple[int, ...]]] = {}
    first = 0
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        touched = set(where[first : first + sizes[place]])
        if len(touched) > 1 and sizes[place] <= min(size for _, size in touched):
            return None
        found[place] = flat[first : first + sizes[place]]
        first += sizes[place]
    return [found[place] for place in range(len(sizes))]


def _over_nodes(
    nodes: Sequence[Sequence[tuple[int, ...]]], sizes: Sequence[int]
) -> list[Sequence[tuple[int, ...]]]:
    """Return as many cores, each worker's from all memory nodes in turn: it reads from all."""
    turns = max(map(len, nodes))
    dealt = [node[turn] for turn in range(turns) for node in nodes if turn < len(node)]
    return [dealt[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]


def _partitions(workers: list[str]) -> Iterator[list[list[str]]]:
    """Yield all ways to put workers into groups, the finest first."""
    if not workers:
        yield []
        return
    first, *rest = workers
    for groups in _partitions(rest):
        yield [[first], *groups]
        for place, group in enumerate(groups):
            yield [*groups[:place], [first, *group], *groups[place + 1 :]]


def _ordered_cores(spec: HardwareSpec) -> list[tuple[int, ...]]:
    """Return the allowed PUs core by core; cores that share most stand together."""
    allowed = set(spec.allowed_pus)
    core_of = {pu.id: pu.core for pu in spec.pus}
    pus: dict[int, list[int]] = {}
    for pu in choose_pus(spec, len(allowed)):
        pus.setdefault(core_of[pu], []).append(pu)
    home = {pu.id: (pu.socket, pu.node) for pu in spec.pus}
    # kinds of core stay apart only within a node: a share that spans nodes costs more
    return [tuple(core) for core in sorted(pus.values(), key=lambda core: home[core[0]])]


def _flat(cores: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return a PU of each core: its others idle while several workers share the machine."""
    return tuple(core[0] for core in cores)
