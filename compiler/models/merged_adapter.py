"""LoRA adapters: folders of PEFT that say what to add to the weights of another model.

In: a folder with adapter_config.json and adapter_model.safetensors, and the checkpoint of the model
that it was trained on. Out: that checkpoint with the sums in place, rounded as its weights are.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.compiler.families.experts import module_name
from dovetail.compiler.families.score_row import EMBEDDING, HEAD, has_own_head
from dovetail.compiler.families.text_part import is_text, text_name
from dovetail.compiler.files.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    Coded,
    Rearranged,
    TensorInfo,
    map_tensor,
    read_header,
)
from dovetail.compiler.files.config import Config
from dovetail.ir.errors import SpecError

Floats = npt.NDArray[np.float32]
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE = "base_model_name_or_path"
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Keys of adapter_config.json with the values that are computed; other starts (`pissa`) change the
model's own weights, too."""
_OF_LORA = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_embedding_[AB]|lora_[AB]\.weight|lora_magnitude_vector)"
)
_ROUNDED = re.compile(r"(-unsloth)?-bnb-4bit$")
"""How names of models end that bitsandbytes has rounded, whose float model has the rest."""
_PREFIX = "base_model.model."


def is_adapter(path: Path) -> bool:
    """Tell whether a folder has an adapter, and no whole model beside it."""
    whole = any((path / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    return (path / ADAPTER_CONFIG).is_file() and not whole


def base_name(folder: Path) -> str:
    """Return the path, or the id at the hub, of the model that an adapter belongs to.

    Of one that was trained beside weights of 4 bits it is the float model, to which it is added.
    """
    config = Config.read(folder / ADAPTER_CONFIG)
    name, revision = config.text(BASE), config.text("revision", "")
    if Path(name).is_dir():
        return name
    if rounded := _ROUNDED.search(name):
        return name[: rounded.start()]
    return f"{name}@{revision}" if revision else name


def find_base(folder: Path) -> Path:
    """Return where that model is: at its path, or fetched from the hub before; else SpecError."""
    if (path := Path(base_name(folder))).is_dir():  # whose name may have an @
        return path
    name, _, revision = base_name(folder).partition("@")
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to load

    here: dict[str, Any] = {"local_files_only": True, "allow_patterns": []}
    try:
        return Path(snapshot_download(name, revision=revision or None, **here))
    except (OSError, ValueError):
        raise SpecError(
            f"{folder} is an adapter of {name}, which is neither a folder nor a model fetched from "
            f"the hub; write the path of that model as {BASE} into its {ADAPTER_CONFIG}"
        ) from None


def merge(folder: Path, base: Checkpoint, *, tied: bool) -> Checkpoint:
    """Return `base` with what an adapter adds to its weights, or has in their place.

    tied: its embedding is the head, too, unless another one is stored.
    Raises SpecError for an adapter that does not fit it, or asks for what is not computed.
    """
    config = read_config(folder)
    parts: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    tensors = dict(base.tensors)
    for info, changed, part in read_parts(folder):
        if changed in (EMBEDDING, HEAD) and _is_head(base, tied=tied):
            raise SpecError(
                f"{info.path}: tensor {info.name} changes an embedding that is the head, too, "
                "which is not supported; merge this adapter with PEFT (merge_and_unload) first"
            )
        target = _target(base, changed, info)
        if part:
            parts[target.name][part] = info
        else:
            tensors[target.name] = replace(
                info,
                name=target.name,
                heads=target.heads,
                turned=target.turned,
                skipped=target.skipped,
            )
    for name, stored in parts.items():
        tensors[name] = replace(base.info(name), packed=_Sum.read(base, name, stored, config))
    return replace(base, tensors=tensors)


def _is_head(base: Checkpoint, *, tied: bool) -> bool:
    return not has_own_head(base) if tied else not {EMBEDDING, HEAD} <= base.tensors.keys()


def read_config(folder: Path) -> Config:
    """Return the configuration of an adapter; SpecError where it asks for what is not computed."""
    config = Config.read(folder / ADAPTER_CONFIG)
    for key, known in _PLAIN.items():
        if key in config.values and config.values[key] not in known:
            raise config.fail(key, f"but only {known[0]!r} is supported")
    return config


def read_parts(folder: Path) -> Iterator[tuple[TensorInfo, str, str]]:
    """Yield each tensor of an adapter, the weight that it changes, and which part of a sum it is.

    No part: it is the weight. Those of pictures and sound are passed over, as the model's are.
    Raises SpecError where there is none.
    """
    if not (found := read_header(folder / ADAPTER_WEIGHTS)):
        raise SpecError(f"{folder}: the adapter changes nothing; was it saved with its weights?")
    for info in found.values():
        name = info.name.removeprefix(_PREFIX)
        if not is_text(name):
            continue
        if lora := _OF_LORA.fullmatch(name):
            name, part = f"{lora['module']}.weight", lora["part"].removesuffix(".weight")
        else:
            part = ""
        yield info, module_name(text_name(name)), part


def _target(base: Checkpoint, name: str, info: TensorInfo) -> TensorInfo:
    """Return the weight of the model that a tensor of an adapter changes: of floats."""
    target = find_target(base, name, info)
    if isinstance(target.packed, Rearranged):
        raise SpecError(
            f"{target.path}: {name} is multiplied or parted when it is read, and adapters are not "
            "added to it; merge this adapter with PEFT (merge_and_unload) first"
        )
    if isinstance(target.packed, Coded) or (target.quantised and target.packed is None):
        raise SpecError(
            f"{base.path} is quantised, and adapters are added to float weights; write the path of "
            f"the float model as {BASE} into {ADAPTER_CONFIG}, and quantise by --weight-dtype"
        )
    return target


def find_target(base: Checkpoint, name: str, info: TensorInfo) -> TensorInfo:
    """Return the weight of the model that a tensor of an adapter changes."""
    if name not in base.tensors:
        raise SpecError(
            f"{info.path}: tensor {info.name} changes {name}, which {base.path} does not have; is "
            "it the model that the adapter was trained on?"
        )
    return base.tensors[name]


@dataclass(frozen=True, slots=True)
class _Sum:
    """Rows of a matrix [n][k] with `up` [n][rank] times `down` [rank][k] added to each.

    lengths: of DoRA: what the length of each row of the sum becomes, [n].
    """

    base: Checkpoint
    name: str
    up: Floats
    down: Floats
    lengths: Floats | None

    @classmethod
    def read(
        cls, base: Checkpoint, name: str, stored: Mapping[str, TensorInfo], config: Config
    ) -> _Sum:
        """Read both factors, and scale one. Raises SpecError for shapes that do not fit."""
        target, where = base.info(name), next(iter(stored.values()))
        factors = Factors.of(target, stored, config)
        up, down = factors.up(), factors.down()
        length = stored.get("lora_magnitude_vector")
        lengths = None if length is None else length.dtype.widen(map_tensor(length))
        if lengths is not None and lengths.shape != target.shape[:1]:
            raise SpecError(f"{where.path}: tensor {where.name} has one length too many or few")
        stored_rows = target.stored_rows(0, target.height)
        up, lengths = up[stored_rows], None if lengths is None else lengths[stored_rows]
        return cls(base, name, up, down, lengths)

    def values(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return rows [first, last) of the sum, of the weight's own dtype."""
        dtype = self.base.info(self.name).dtype
        rows = dtype.widen(self.base.rows(self.name, first, last))
        rows = rows + self.up[first:last] @ self.down
        if self.lengths is not None:
            rows *= (self.lengths[first:last] / np.linalg.norm(rows, axis=1))[:, None]
        return dtype.narrow(rows)


@dataclass(frozen=True, slots=True)
class Factors:
    """Where the factors of a sum stand, [n][rank], to be scaled, and [rank][k].

    turned: both are stored the other way round, as those of a table are.
    """

    tensors: tuple[TensorInfo, TensorInfo]
    scale: np.float32
    turned: bool

    @classmethod
    def of(cls, target: TensorInfo, stored: Mapping[str, TensorInfo], config: Config) -> Factors:
        """Find both by their headers; SpecError for shapes that do not fit the weight."""
        turned = "lora_embedding_A" in stored
        names = ("lora_embedding_A", "lora_embedding_B") if turned else ("lora_B", "lora_A")
        found = [stored[part] for part in names if part in stored]
        shapes = [info.shape[:: -1 if turned else 1] for info in found]
        where, name = next(iter(stored.values())), target.name
        if [*map(len, shapes)] != [2, 2] or shapes[0][1] != shapes[1][0]:
            raise SpecError(f"{where.path}: the two factors for {name} do not fit together")
        (n, rank), (_, k) = shapes
        if (n, k) != target.shape or not rank * k:
            raise SpecError(
                f"{where.path}: the sum for {name} has shape {[n, k]}, the weight in "
                f"{target.path} has {list(target.shape)}"
            )
        return cls((found[0], found[1]), _scale(config, where.name, rank), turned)

    @property
    def rank(self) -> int:
        """What is summed over."""
        return self.tensors[1].shape[1 if self.turned else 0]

    @property
    def finite(self) -> bool:
        """Whether all values are."""
        return all(info.dtype.all_finite(map_tensor(info)) for info in self.tensors)

    def up(self) -> Floats:
        """Read the first factor, scaled."""
        return self._read(0) * self.scale

    def down(self) -> Floats:
        """Read the second factor."""
        return self._read(1)

    def _read(self, place: int) -> Floats:
        values = self.tensors[place].dtype.widen(map_tensor(self.tensors[place]))
        return values.T if self.turned else values


def _scale(config: Config, factor: str, rank: int) -> np.float32:
    """Return what a sum of two factors is multiplied by.

    factor: the name of one. As in PEFT, the first pattern counts that matches the end of the name
    of its module; a dot stands for any character.
    """
    lora = _OF_LORA.fullmatch(factor.removeprefix(_PREFIX))
    assert lora, "only names of factors come here"
    alpha = config.number("lora_alpha", 0.0, 1e6, 8.0)
    own = config.section("alpha_pattern") if config.has("alpha_pattern") else config
    for ending in own.values if own is not config else ():
        if not re.fullmatch(r"[\w.]+", ending):
            raise config.fail("alpha_pattern", f"but {ending!r} is more than the end of a name")
        if re.fullmatch(rf"(.*\.)?{ending}", lora["module"]):
            alpha = own.number(ending, 0.0, 1e6)
            break
    return np.float32(alpha / (sqrt(rank) if config.flag("use_rslora") else rank))
