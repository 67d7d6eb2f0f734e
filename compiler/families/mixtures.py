"""Mixtures of experts in configurations: what a family fixes of them, and what config.json tells.

In: a config.json. Out: an `ExpertSpec`: the router, experts, the MLP of all tokens beside them, and
which layers have none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dovetail.compiler.files.config import Config
from dovetail.ir.errors import SpecError
from dovetail.ir.model import PANEL, ExpertSpec

MOST_EXPERTS = 1024
"""Those that the kernel `route` has room for."""
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of experts, by family and version of transformers."""
_USED = ("num_experts_per_tok", "moe_k", "moe_topk")
"""Likewise, of how many compute a token."""
MAX_INNER = 1 << 20

DenseLayers = Callable[[Config, int], tuple[bool, ...]]
"""(config, layers) to whether each has no experts, () for none."""
Shared = Callable[[Config, int], int]
"""(config, width of an expert) to that of the MLP beside experts, 0 for none."""


# ---- layers without experts ----


def _no_dense(_config: Config, _n_layers: int) -> tuple[bool, ...]:
    return ()


def qwen_dense(config: Config, n_layers: int) -> tuple[bool, ...]:
    """Qwen: those of mlp_only_layers, and all but each decoder_sparse_step-th."""
    step = config.integer("decoder_sparse_step", 1, 1 << 20, 1)
    listed = config.values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise config.fail("mlp_only_layers", "but must be a list of layers")
    return tuple((layer + 1) % step != 0 or layer in listed for layer in range(n_layers))


def first_dense(default: int) -> DenseLayers:
    """GLM and dots: the first layers, by default so many."""

    def find(config: Config, n_layers: int) -> tuple[bool, ...]:
        first = config.integer("first_k_dense_replace", 0, 1 << 20, default)
        return tuple(layer < first for layer in range(n_layers))

    return find


def listed_dense(default: int) -> DenseLayers:
    """DeepSeek V3 and GLM Flash: those that mlp_layer_types names, or as `first_dense`."""

    def find(config: Config, n_layers: int) -> tuple[bool, ...]:
        kinds = config.texts("mlp_layer_types")
        if not kinds:
            return first_dense(default)(config, n_layers)
        if len(kinds) != n_layers or not set(kinds) <= {"dense", "sparse"}:
            raise config.fail("mlp_layer_types", f"but must name dense or sparse {n_layers} times")
        return tuple(kind == "dense" for kind in kinds)

    return find


def ernie_dense(config: Config, n_layers: int) -> tuple[bool, ...]:
    """ERNIE 4.5: those before the first and behind the last of experts, and some between."""
    first = config.integer("moe_layer_start_index", 0, 1 << 20, 1)
    last = config.integer("moe_layer_end_index", -1, 1 << 20, -1)
    each = config.integer("moe_layer_interval", 1, 1 << 20, 1)
    mixed = range(first, (n_layers - 1 if last == -1 else last) + 1)
    return tuple((i + 1) % each != 0 or i not in mixed for i in range(n_layers))


# ---- the MLP beside experts ----


def _no_shared(_config: Config, _inner: int) -> int:
    return 0


def shared_width(key: str, default: int) -> Shared:
    """Return what reads its width from a key."""
    return lambda config, _: config.integer(key, 0, MAX_INNER, default)


def shared_experts(key: str, default: int) -> Shared:
    """Return what reads how many experts wide it is from a key."""
    return lambda config, inner: inner * config.integer(key, 0, MOST_EXPERTS, default)


def one_shared(_config: Config, inner: int) -> int:
    """Hunyuan: it is as wide as an expert."""
    return inner


# ---- mixtures ----


@dataclass(frozen=True, slots=True)
class Mixture:
    """What a family fixes of its mixtures; `ExpertSpec` explains most.

    share: the weights of a token's experts sum to 1 unless config.json says otherwise. inner: key
    of the width of an expert. optional: without experts a model of the family is dense.
    """

    share: bool = True
    sigmoid: bool = False
    biased: bool = False
    inner: str = "intermediate_size"
    dense: DenseLayers = _no_dense
    shared: Shared = _no_shared
    gated: bool = False
    optional: bool = False


def has_experts(config: Config, mixture: Mixture | None) -> bool:
    """Return whether a model has experts."""
    if mixture is None:
        return False
    return not mixture.optional or config.integer(_key(config, _COUNTS), 0, MOST_EXPERTS, 0) > 0


def read_experts(
    config: Config, mixture: Mixture, *, hidden: int, inner: int, dense: str, n_layers: int
) -> ExpertSpec:
    """Return the experts of a configuration; inner: their width; dense: key of that of other MLPs.

    Raises SpecError for unequal groups of experts, and for widths that are no panels.
    """
    if hidden % PANEL or inner % PANEL:
        raise SpecError(
            f"{config.name}: experts of {hidden} x {inner} values are not supported, only "
            f"multiples of {PANEL}"
        )
    count = config.integer(_key(config, _COUNTS), 1, MOST_EXPERTS)
    used = _key(config, _USED)
    groups, groups_used = _groups(config, mixture, count)
    shared, without = mixture.shared(config, inner), mixture.dense(config, n_layers)
    return ExpertSpec(
        count=count,
        used=_alike(config, used).integer(used, 1, count),
        share=config.flag("norm_topk_prob", mixture.share),
        sigmoid=mixture.sigmoid,
        biased=mixture.biased,
        groups=groups,
        groups_used=groups_used,
        scale=config.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
        shared=shared,
        gated=mixture.gated and shared > 0,
        dense=config.integer(dense, 1, MAX_INNER) if any(without) else 0,
        dense_layers=without if any(without) else (),
    )


def _groups(config: Config, mixture: Mixture, count: int) -> tuple[int, int]:
    """Return the groups of experts, and from how many of them a token's experts come."""
    if not mixture.sigmoid and config.text("topk_method", "greedy") == "greedy":
        return 1, 1
    groups = config.integer("n_group", 1, count, 1)
    used = config.integer("topk_group", 1, groups, 1)
    least = 2 if mixture.sigmoid else 1
    if count % groups or (groups > 1 and count // groups < least):
        raise config.fail("n_group", f"but must cut {count} experts into equal groups")
    return groups, used


def _alike(config: Config, key: str) -> Config:
    """Return the configuration with one number for a list that has the same for all layers."""
    value = config.values.get(key)
    if not isinstance(value, list) or any(each != value[0] for each in value):
        return config
    return Config(config.name, {**config.values, key: value[0] if value else None})


def _key(config: Config, known: tuple[str, ...]) -> str:
    return next((key for key in known if config.has(key)), known[0])
