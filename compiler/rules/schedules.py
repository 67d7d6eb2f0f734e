"""Micro-kernels, and default schedules by rules: which one serves which M.

In: ModelSpec, target, thread plan, cache sizes. Out: kernel requests for the library and a
ScheduleFile with total cover of M. Nothing is measured here; `dovetail.compiler.search` refines it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from msgspec.structs import replace as replace_struct

from dovetail.codegen.catalog import (
    PROMPTS,
    HeadShape,
    KernelRequest,
    head_shape,
    kernel_request,
    weight_binding,
)
from dovetail.codegen.isa.target import Target
from dovetail.ir.block_format import GROUP, QUAD, BlockFormat
from dovetail.ir.encoder import EncoderSpec, Spec
from dovetail.ir.formats import FORMATS, FloatFormat, is_quantised
from dovetail.ir.model import (
    APART,
    HEAD_PRODUCTS,
    PANEL,
    RELU2,
    XIELU,
    LatentSpec,
    MlpPart,
    ModelSpec,
    latent_shapes,
)
from dovetail.ir.schedule import ORDERS, SCHEDULE_VALUES, Row, ScheduleTable
from dovetail.ir.tuning import WorkKey
from dovetail.runtime.native.shard import Shard, split_model
from dovetail.topology.values import HardwareSpec

LINEAR, SILU, GEGLU, GEGLU_TANH = "linear", "silu", "geglu", "geglu_tanh"
CLAMPED = "clamped"
ACTIVATED = ("gelu", "gelu_tanh", RELU2)
"""Products that are linear ones with an activation of the finished sums, by its name."""
GATED = (SILU, GEGLU, GEGLU_TANH, CLAMPED)
"""Products of two weights in one: an activation of the first times the second."""
GATES = {"silu": SILU, "gelu_tanh": GEGLU_TANH, "clamped": CLAMPED}
ENCODER_GATES = {"silu": SILU, "gelu": GEGLU}
"""An activation to its gated product, of a decoder and of an encoder."""
DECODER_KINDS = (LINEAR, SILU)
DOT_ROWS, TILE_ROWS = 8, 16
"""Rows from which a product is bound by arithmetic, and rounding activations to bfloat16 pays: by
dot products of pairs (measured), in tile registers."""
SPREAD_PREFETCH, FAR_PREFETCH = -1, -4096
"""`prefetch` values: fetch the next slice of weights, each row tile its share of it, into the first
cache; into the second, from which weights come into the first 4 KiB ahead of their use."""
SINGLE_PREFETCH = -1024
"""Where one tile takes all rows, weights pass once, and what is not there in time is waited for:
they come into the second cache a group of panels ahead, into the first 1 KiB ahead (measured: 512
to 2048; past the second cache, 1 to 4 KiB ahead). AVX2 alone gains by the near one only."""
NEAR_PREFETCH = 1024
K_UNIT = 64
"""Step of the slice along K, in values: whole cache lines of activations (Sandwich: b_K is aligned
with the line); shorter slices pass C through the caches more often than they are worth."""
SUMS = 32768
"""Elements that sums have room for where K is innermost (`gemm.dk`), else K stays whole."""
TILE_BLOCK = 128
"""Rows of a block in tile registers. In bfloat16 one and a half second caches hold them while all
panels pass; of a longer K they hold a slice, of twice as many rows (2 MiB: K of 11,008 and 14,336
measured)."""
TILE_CACHE = 2 << 20
"""The least second cache of CPUs with tile registers, some of which report none."""


@dataclass(frozen=True, slots=True, order=True)
class MicroKernel:
    """A register tile: `rows` of activations by `panels` of 16 weight columns."""

    rows: int
    panels: int

    def registers(self, lanes: int) -> int:
        """Vector registers it needs: accumulators, the shorter side, one of the longer side."""
        vectors = self.panels * PANEL // lanes
        return self.rows * vectors + min(self.rows, vectors) + 1

    def widening_registers(self, lanes: int) -> int:
        """Registers beside these, for weights of 16 bits: the pairs of those that are held, or one.

        AVX-512, which multiplies by a broadcast in memory, needs no register for that (measured).
        """
        vectors = self.panels * PANEL // lanes
        return vectors if lanes < LONG_LANES and vectors <= self.rows else 1

    def integer_registers(self, lanes: int) -> int:
        """As many of a product of quantised weights, which has integer sums of a block beside.

        Of accumulators, needed once a block, those of one vector, but all of AVX-512's: it may
        load one vector a cycle (Zen 4), and needs these loads for activations. Codes and their
        scales take four more, six of AVX-512 (with five each row takes up to 1.7 times as long,
        measured).
        """
        vectors = self.panels * PANEL // lanes
        if lanes < LONG_LANES:
            return self.rows * (vectors + 1) + 4
        return (2 * self.rows + 1) * vectors + 6


MOST_ROWS = dict.fromkeys(GATED, 14) | dict.fromkeys((LINEAR, *ACTIVATED), 16)
PANEL_COUNTS = dict.fromkeys(GATED, (2, 4)) | dict.fromkeys((LINEAR, *ACTIVATED), (1, 2, 3, 4))
"""The tiles considered; a gated product takes gate and up panels in pairs. Higher ones of one panel
hold no more accumulators than 14 x 2, and would take the C compiler more time than all others."""
QUANTISED_PANELS = dict.fromkeys(GATED, (2,)) | dict.fromkeys((LINEAR, *ACTIVATED), (1, 2))
"""Those of quantised weights."""
LONG_LANES = 16
"""Lanes of vectors of which some CPUs load one a cycle, of shorter ones two."""
AVX2_LANES, HALVED_FROM = 8, 12
"""Lanes of AVX2, whose registers hold gated tiles of two rows where 16 bits are widened, and the
rows from which tiles of six serve, which take half of each panel at a time: lower ones have too few
sums to hide the latency of multiply-adds (measured, AVX2: 1.09x to 1.26x; 0.8x at 4 rows)."""
UNPACKING = 1.5
"""Instructions that unpack a vector of codes of 4 bits, which all rows of a tile share."""
SCALAR_ROWS = dict.fromkeys(((kind, 2) for kind in GATED), 1) | dict.fromkeys(
    ((kind, 1) for kind in (LINEAR, *ACTIVATED)), 2
)
"""(kind, panels) to rows where there are no vectors: the compiler shares out the registers."""


@dataclass(frozen=True, slots=True)
class GemmOp:
    """One matrix product of the model; `n` counts columns of C."""

    op: str
    kind: str
    n: int
    k: int
    dtype: str

    @property
    def weight_panels(self) -> int:
        """Panels in the packed weight: two per panel of C in the gated product."""
        return -(-self.n // PANEL) * (2 if self.kind in GATED else 1)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weight."""
        return self.weight_panels * FORMATS[self.dtype].panel_bytes(self.k)

    def work(self, threads: int) -> WorkKey:
        """Return what its records at any M are found by."""
        return WorkKey.of(self.kind, {"n": self.n, "k": self.k}, self.dtype, threads)

    def kernel(self, target: Target, tile: MicroKernel) -> str:
        """Return the name of the kernel that holds `tile`."""
        built = built_tiles(self.kind, target, self.dtype)
        return kernel_name(self.kind, self.dtype, built[tile.panels])


def gemm_ops(spec: Spec, processes: int = 1) -> tuple[GemmOp, ...]:
    """Return the matrix products of one forward step, by the names schedule tables use.

    Of several processes: those of the one with the largest shard, which has q, and k and v, apart.
    """
    return tuple(count_gemms(spec, processes))


def count_gemms(spec: Spec, processes: int = 1) -> dict[GemmOp, int]:
    """Return how often each of `gemm_ops` runs in one step: of experts those of one token."""
    if isinstance(spec, EncoderSpec):
        assert processes == 1, "encoders are not shared"
        return dict(Counter(_encoder_gemms(spec)))
    shards = [split_model(spec, rank, processes) for rank in range(processes)]
    hidden, vocabulary = spec.hidden_size, max(len(shard.vocab) for shard in shards)
    found: Counter[GemmOp] = Counter()
    for layer in range(spec.n_layers):
        here, parts = f"layers.{layer}", spec.qkv_parts(layer)
        products, outputs = list[tuple[str, int]](), list[tuple[str, str, int, int, int]]()
        if spec.latent:
            found.update(_latent_gemms(spec, spec.latent, here))
            outputs.append(("o", LINEAR, hidden, spec.n_heads * spec.latent.values, 1))
        elif spec.attends(layer):
            sides = _largest_share(spec, shards, layer)
            outputs.append(("o", LINEAR, hidden, sides[0], 1))
            sides[0] += spec.gate_size
            sides = [sum(sides)] if len(parts) == processes == 1 else sides
            products += [(parts[i % len(parts)], n) for i, n in enumerate(sides)]
        if (recurrent := spec.recurrent) and spec.is_recurrent(layer):
            products += [(f"{here}.{name}", n) for name, n in recurrent.products.items()]
            outputs.append((recurrent.out, LINEAR, hidden, recurrent.width, 1))
        for name, n in products:
            found[GemmOp("qkv", LINEAR, n, hidden, spec.weight_format(name))] += 1
        mlp = (row for part in spec.mlp_parts(layer) for row in _mlp_gemms(spec, part, shards))
        for name, kind, n, k, times in (*outputs, *mlp):
            found[GemmOp(name, kind, n, k, spec.weight_format(f"{here}.{name}"))] += times
        for name, op, kind, n, k in _own_products(spec):
            found[GemmOp(op, kind, n, k, spec.weight_format(f"{here}.{name}"))] += 1
    if spec.layer_inputs:
        every, stored = spec.n_layers * spec.layer_inputs, spec.weight_format("layer_inputs")
        found[GemmOp("layer_inputs", LINEAR, every, hidden, stored)] += 1
    found[GemmOp("head", LINEAR, vocabulary, hidden, spec.weight_format("head"))] += 1
    return dict(found)


def _latent_gemms(spec: ModelSpec, latent: LatentSpec, here: str) -> Counter[GemmOp]:
    """Return the products of latent attention but for the last one; those of heads are apart."""
    found: Counter[GemmOp] = Counter()
    for name, (n, k) in latent_shapes(spec, latent).items():
        if name == "o":
            continue
        each = spec.n_heads if name in HEAD_PRODUCTS else 1
        op, stored = "heads" if each > 1 else "qkv", spec.weight_format(f"{here}.{name}")
        found[GemmOp(op, LINEAR, n // each, k, stored)] += each
    return found


def apart_gemms(spec: Spec, processes: int = 1) -> tuple[GemmOp, ...]:
    """Return the products that give gates and ups apart, in the place of gated ones."""
    gated = (op for op in gemm_ops(spec, processes) if op.op == "gate_up")
    return tuple(dict.fromkeys(map(take_apart, gated)))


def take_apart(op: GemmOp) -> GemmOp:
    """Return the product that gives both sums of a gated one."""
    return replace(op, op=APART, kind=LINEAR, n=op.weight_panels * PANEL)


def _largest_share(spec: ModelSpec, shards: Sequence[Shard], layer: int) -> list[int]:
    """Return the columns of a layer's q, k and v in the largest shard."""
    if len(shards) == 1:
        return list(spec.qkv_rows(layer))
    kv_heads = max(len(shard.kv_heads) for shard in shards)
    sides = max(len(shard.heads) for shard in shards), kv_heads, kv_heads
    return [spec.head_dim * n for n in sides]


def _own_products(spec: ModelSpec) -> Iterator[tuple[str, str, str, int, int]]:
    """Yield the products, by weight and operator, that few families have beside the others."""
    hidden = spec.hidden_size
    if width := spec.layer_inputs:
        yield "input_gate", "input_gate", LINEAR, width, hidden
        yield "input_out", "input_out", LINEAR, hidden, width


def _mlp_gemms(
    spec: ModelSpec, part: MlpPart, shards: list[Shard]
) -> Iterator[tuple[str, str, int, int, int]]:
    """Yield (op, kind, N, K, times) of a part of an MLP, of the largest of the shards."""
    hidden, used = spec.hidden_size, part.experts.used if part.experts else 1
    inner = max(len(shard.inner(part.columns)) for shard in shards)
    if part.experts:
        yield "router", LINEAR, part.experts.scores, hidden, 1
    kind = LINEAR if spec.activation == XIELU else GATES.get(spec.activation, spec.activation)
    yield part.prefix + spec.up, kind, inner, hidden, used
    yield part.prefix + "down", LINEAR, hidden, inner, used


def _encoder_gemms(spec: EncoderSpec) -> Iterator[GemmOp]:
    """Yield the products of a pass, those of every layer."""
    for i, dense in enumerate(spec.dense):
        yield GemmOp("dense", LINEAR, dense.n, dense.k, spec.weight_format(f"dense.{i}"))
    if spec.decoder:
        layers = Counter(count_gemms(spec.decoder)).elements()
        yield from (op for op in layers if op.op != "head")
        yield from _classifier_gemms(spec)
        return
    hidden, inner = spec.hidden_size, spec.intermediate_size
    up = ("gate_up", ENCODER_GATES[spec.activation]) if spec.gated else ("up", spec.activation)
    shapes: tuple[tuple[str, str, int, int], ...] = (
        ("qkv", LINEAR, spec.qkv_size, hidden),
        ("o", LINEAR, hidden, spec.n_heads * spec.head_dim),
        (*up, inner, hidden),
        ("down", LINEAR, hidden, inner),
    )
    for layer in range(spec.n_layers):
        for name, kind, n, k in shapes:
            yield GemmOp(name, kind, n, k, spec.weight_format(f"layers.{layer}.{name}"))
    if spec.labels:
        kind = LINEAR if spec.head == "tanh" else "gelu"
        yield GemmOp("pooler", kind, hidden, hidden, spec.weight_format("pooler"))
    yield from _classifier_gemms(spec)


def _classifier_gemms(spec: EncoderSpec) -> Iterator[GemmOp]:
    if spec.labels:
        dtype = spec.weight_format("classifier")
        yield GemmOp("classifier", LINEAR, spec.labels, spec.hidden_size, dtype)


HEADS = ("head", "pooler", "classifier", "dense")
"""Products that a step has one of, on a row for each sequence."""


def gemm_kinds(spec: Spec) -> tuple[str, ...]:
    """Return the kinds of a model's products."""
    return tuple(dict.fromkeys(op.kind for op in gemm_ops(spec)))


def gemm_formats(spec: Spec) -> tuple[str, ...]:
    """Return the weight formats of a model's products."""
    return tuple(dict.fromkeys(op.dtype for op in gemm_ops(spec)))


def micro_kernels(kind: str, target: Target, dtype: str = "f32") -> tuple[MicroKernel, ...]:
    """Return every tile that fits the register file of `target`, by panels and rows.

    What must fit without spilling: accumulators, B vectors and broadcast (Sandwich §6).
    """
    return _fitting_tiles(kind, dtype, target.lanes, target.registers)


def takes_halves(kind: str, dtype: str, lanes: int) -> bool:
    """Return whether tall tiles take half of each panel at a time."""
    return kind in GATED and lanes == AVX2_LANES and FORMATS[dtype].dtype.size == 2


@lru_cache
def _fitting_tiles(kind: str, dtype: str, lanes: int, registers: int) -> tuple[MicroKernel, ...]:
    counts = QUANTISED_PANELS if is_quantised(dtype) else PANEL_COUNTS
    return tuple(
        tile
        for panels in counts[kind]
        for rows in range(1, MOST_ROWS[kind] + 1)
        if _fits(kind, tile := MicroKernel(rows, panels), dtype, lanes, registers)
    )


def _fits(kind: str, tile: MicroKernel, dtype: str, lanes: int, registers: int) -> bool:
    if lanes == 1:
        return tile.rows <= SCALAR_ROWS.get((kind, tile.panels), 0)
    if is_quantised(dtype):
        return tile.integer_registers(lanes) <= registers
    halves = tile.panels == 2 and takes_halves(kind, dtype, lanes)
    held = replace(tile, panels=1) if halves else tile
    return held.registers(lanes) <= registers


def built_tiles(kind: str, target: Target, dtype: str = "f32") -> dict[int, MicroKernel]:
    """Return the tallest tile of each panel count: its kernel holds all lower ones."""
    return {tile.panels: tile for tile in micro_kernels(kind, target, dtype)}


def kernel_name(kind: str, dtype: str, tile: MicroKernel) -> str:
    """Return the exported name of a built tile's kernel, e.g. `gemm_linear_f32_14x2`."""
    return f"gemm_{kind}_{dtype}_{tile.rows}x{tile.panels}"


def reduce_kernel(kind: str, dtype: str, schedule: Sequence[int]) -> str | None:
    """Return the kernel that adds up the parts of K, or None where a schedule does not split K."""
    split = kind not in GATED and schedule[SCHEDULE_VALUES.index("grid_k")] > 1
    return f"gemm_{kind}_reduce_{dtype}" if split else None


def gemm_requests(
    dtypes: Iterable[str], target: Target, kinds: Sequence[str] = DECODER_KINDS
) -> tuple[KernelRequest, ...]:
    """Return the GEMM kernels for weights of these dtypes: between them they hold every tile."""
    return tuple(
        request for dtype in dtypes for kind in kinds for request in _requests(kind, dtype, target)
    )


_ACTS = {GEGLU: "gelu", GEGLU_TANH: "gelu_tanh"} | {kind: kind for kind in (CLAMPED, *ACTIVATED)}
"""Kind of a product to what a kernel calls its activation, where that is no default."""


def _requests(kind: str, dtype: str, target: Target) -> Iterator[KernelRequest]:
    family = "gemm_silu" if kind in GATED else "gemm_linear"
    act: dict[str, int | str] = {"ACT": _ACTS[kind]} if kind in _ACTS else {}
    stored = weight_binding(dtype)
    if kind not in GATED:
        name = f"gemm_{kind}_reduce_{dtype}"
        yield KernelRequest("gemm", "gemm_linear_reduce", {**stored, **act}, name)
    for tile in built_tiles(kind, target, dtype).values():
        binding = stored | {"MR": tile.rows, "NP": tile.panels} | act
        binding |= _rounding(dtype, target)
        binding |= {} if kind in GATED else {"SUMS": SUMS}
        if tile.panels == 2 and takes_halves(kind, dtype, target.lanes):
            binding["HALVES"] = _rule_tiles(kind, dtype, target.lanes, target.registers)[0].rows
        yield KernelRequest("gemm", family, binding, kernel_name(kind, dtype, tile))


def _rounding(dtype: str, target: Target) -> dict[str, int | str]:
    """Return the tunables that say how activations meet weights of a format."""
    form = FORMATS[dtype]
    if isinstance(form, BlockFormat):
        wide = int(target.quads == "wide")
        return {"DOT": 1, "ROUNDED": "i8", "WIDE": wide, "SUM16": _sum16(form, target)}
    rows = dot_rows(dtype, target)
    return {"DOT": rows, "TILES": 1} if rows and target.tiles else {"DOT": rows}


SUMMED_QUADS = {4: 8, 5: 4, 6: 2}
"""Bits of integers to the quads whose products with int8 fit 16 bits together: 15 * 127 * 2 * 8."""


def _sum16(form: BlockFormat, target: Target) -> int:
    """Return how many quads are summed in 16 bits: where no instruction sums four products."""
    quads = min(form.block, GROUP) // QUAD
    return min(SUMMED_QUADS.get(form.depth, 0), quads) if target.sums_16 else 0


def dot_rows(dtype: str, target: Target) -> int:
    """Return the M from which `dtype` weights are multiplied in bfloat16 pairs; 0 = never."""
    form = FORMATS[dtype]
    if not (isinstance(form, FloatFormat) and form.pair_dots and target.rounds_rows):
        return 0
    return TILE_ROWS if target.tiles else DOT_ROWS


def takes_tiles(op: GemmOp, target: Target, m: int) -> bool:
    """Return whether `m` rows are multiplied in tile registers, whatever kernel it is."""
    return target.tiles and 0 < dot_rows(op.dtype, target) <= m


def gemm_kernels(
    spec: Spec, target: Target, tables: Iterable[ScheduleTable]
) -> tuple[KernelRequest, ...]:
    """Return the GEMM kernels that the schedule tables of `spec` for `target` name, no others."""
    rows = [row for table in tables if table.target == target.name for row in table.rows]
    used = {row.kernel for row in rows} | {row.reduce_kernel for row in rows}
    requests = gemm_requests(gemm_formats(spec), target, gemm_kinds(spec))
    return tuple(request for request in requests if request.name in used)


def option_kernels(spec: ModelSpec, target: Target) -> tuple[KernelRequest, ...]:
    """Return attention that options of a load put into tables: see `native/deterministic.py`."""
    shapes = (head_shape(spec), replace(head_shape(spec), rounded=False))
    prompts = [kernel_request(f, target, spec.kv_dtype, s) for s in shapes for f in PROMPTS]
    any_heads = HeadShape(0, 0, cap=spec.attention_cap)
    return (*prompts, kernel_request("decode_attention", target, spec.kv_dtype, any_heads))


def make_schedule(**values: int) -> tuple[int, ...]:
    """Return schedule values in their fixed order; what is not named is 0 (grid sides: 1)."""
    assert values.keys() <= set(SCHEDULE_VALUES), values
    grid = dict.fromkeys(("grid_m", "grid_n", "grid_k"), 1)
    return tuple({**grid, **values}.get(name, 0) for name in SCHEDULE_VALUES)


def thread_grid(op: GemmOp, m: int, threads: int) -> tuple[int, int]:
    """Return (grid_m, grid_n): panels are shared first, rows only when panels run out."""
    units = -(-op.n // PANEL)
    columns = max(d for d in range(1, threads + 1) if threads % d == 0 and d <= max(units, 1))
    return min(threads // columns, max(m, 1)), columns


def rule_tiles(op: GemmOp, target: Target) -> tuple[MicroKernel, ...]:
    """Return the tiles that the rules choose from for a product, the first for large M.

    Of each number of panels the tallest that the registers hold, best first by the traffic of a
    multiply-add: rows share a load of weights, columns one of activations. With one vector of float
    columns, loads would outnumber multiply-adds. Codes are unpacked anew by each tile of rows.
    """
    return _rule_tiles(op.kind, op.dtype, target.lanes, target.registers)


@lru_cache
def _rule_tiles(kind: str, dtype: str, lanes: int, registers: int) -> tuple[MicroKernel, ...]:
    quantised, widened = is_quantised(dtype), FORMATS[dtype].dtype.size == 2
    tallest = {
        tile.panels: tile
        for tile in _fitting_tiles(kind, dtype, lanes, registers)
        if quantised
        or lanes == 1
        or (
            tile.panels * PANEL >= 2 * lanes
            and tile.registers(lanes) + widened * tile.widening_registers(lanes) <= registers
        )
    }
    best = [tile for tile in tallest.values() if not _beaten(tile, tallest.values())]
    weights, columns = (UNPACKING, lanes) if quantised else (1, 1)
    return tuple(
        sorted(best, key=lambda tile: weights / tile.rows + columns / (tile.panels * PANEL))
    )


def _beaten(tile: MicroKernel, tiles: Iterable[MicroKernel]) -> bool:
    """Return whether a wider one is as tall."""
    return any(other.panels > tile.panels and other.rows >= tile.rows for other in tiles)


def default_tile(op: GemmOp, target: Target, m: int) -> MicroKernel:
    """Return the widest tile that cuts `m` rows into no more parts than the first one does.

    Many panels are many streams to read. Slices of K take the widest of all. Codes, which each part
    of rows unpacks anew, are bound by arithmetic from the second part on: the first tile does most.
    """
    tiles = rule_tiles(op, target)
    if takes_tiles(op, target, m) or (is_quantised(op.dtype) and m > tiles[0].rows):
        return tiles[0]
    if m >= HALVED_FROM and takes_halves(op.kind, op.dtype, target.lanes):
        return built_tiles(op.kind, target, op.dtype)[tiles[0].panels]
    if slices_k(op, target, m):
        return _widest(tiles)
    rows = -(-m // -(-m // tiles[0].rows))
    return _widest(tile for tile in tiles if tile.rows >= rows)


def _widest(tiles: Iterable[MicroKernel]) -> MicroKernel:
    return max(tiles, key=lambda tile: tile.panels)


def slices_k(op: GemmOp, target: Target, m: int) -> bool:
    """Return whether K is cut into slices: of several tiles of rows, each as high as it is wide.

    Then a slice of its panels serves all rows before the next. Lower tiles fill the registers with
    sums of few rows, which would wait for the slices' partial sums (AVX2, NEON).
    """
    floats = op.kind not in GATED and not is_quantised(op.dtype) and not dot_rows(op.dtype, target)
    tiles = rule_tiles(op, target)
    wide = _widest(tiles)
    return floats and m > tiles[0].rows and wide.rows >= wide.panels > 1


def slice_values(op: GemmOp, tile: MicroKernel, l1_bytes: int) -> int:
    """Return the values of K in each of the equal slices of at most two first caches; 0 = whole."""
    most = 2 * l1_bytes // (tile.panels * PANEL * _size(op))
    parts = -(-op.k // max(most, K_UNIT))
    return -(-op.k // parts // K_UNIT) * K_UNIT if parts > 1 else 0


def default_prefetch(op: GemmOp, target: Target, tile: MicroKernel, m: int, block_k: int) -> int:
    """Return how weights are fetched: ahead in a single pass, else by all tiles for the next one.

    Panels of all K outgrow the first cache, a slice of K and codes wait in it for the next tile.
    Codes of a byte are still waited for by a second tile that is not full (measured: 0.71 to 0.88
    of the time with those of 7 or 8 rows, as much with 10 to 12; those of half a byte are not).
    """
    if takes_tiles(op, target, m):
        return SPREAD_PREFETCH
    if m <= tile.rows:
        return NEAR_PREFETCH if target.lanes == AVX2_LANES else SINGLE_PREFETCH
    if takes_halves(op.kind, op.dtype, target.lanes):  # loads are scarce there
        return SPREAD_PREFETCH
    waits = m < 2 * tile.rows and FORMATS[op.dtype].value_bytes > 1
    return SPREAD_PREFETCH if block_k or (is_quantised(op.dtype) and not waits) else FAR_PREFETCH


def _size(op: GemmOp) -> int:
    return FORMATS[op.dtype].dtype.size


def default_row(op: GemmOp, target: Target, m: int, threads: int, hardware: HardwareSpec) -> Row:
    """Return the row that the rules give `m` tokens: panels outside, slices of K innermost."""
    tile = default_tile(op, target, m)
    values = slice_values(op, tile, hardware.cache_bytes(1)) if slices_k(op, target, m) else 0
    grid_m, grid_n = thread_grid(op, m, threads)
    schedule = make_schedule(
        m_tile=tile.rows,
        block_m=_block_rows(op, target, m, tile, values, hardware),
        block_k=values,
        grid_m=grid_m,
        grid_n=grid_n,
        block_n=1,
        prefetch=default_prefetch(op, target, tile, m, values),
        order=ORDERS.index("mnk") if values else 0,
    )
    return Row(m_lo=m, kernel=op.kernel(target, tile), schedule=schedule)


def _block_rows(
    op: GemmOp, target: Target, m: int, tile: MicroKernel, values: int, hardware: HardwareSpec
) -> int:
    """Return the rows of a block; 0 = all."""
    if takes_tiles(op, target, m):
        cache = max(TILE_CACHE, hardware.cache_bytes(2))
        long = 2 * (2 * op.k * TILE_BLOCK) > 3 * cache
        return 2 * TILE_BLOCK if long else TILE_BLOCK
    if values:
        return SUMS // (tile.panels * PANEL)
    last = hardware.l3_bytes
    return max(last // 2 // (4 * op.k), 16 * tile.rows) if last else 0


def merge_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return `rows` without those that repeat the one before, which takes their largest loss."""
    kept: list[Row] = []
    for row in rows:
        last = kept[-1] if kept else None
        if last is None or (last.kernel, last.schedule) != (row.kernel, row.schedule):
            kept.append(row)
        elif row.measured_loss is not None:
            loss = max(row.measured_loss, last.measured_loss or 0)
            kept[-1] = replace_struct(last, measured_loss=loss)
    return tuple(kept)


def default_gemm_rows(
    op: GemmOp, target: Target, threads: int, hardware: HardwareSpec
) -> tuple[Row, ...]:
    """Return rows covering every M >= 1: from three parts of rows on, the rules change no more."""
    last = max(3 * rule_tiles(op, target)[0].rows, TILE_ROWS)
    return merge_rows(default_row(op, target, m, threads, hardware) for m in range(1, last + 1))
