"""Models by name: an id of the Hugging Face hub to the path of its files, fetched where they lack.

In: `org/name`, `org/name:Q4_K_M` or `org/name/file.gguf`, each with `@revision` or without. Out: a
model directory or a GGUF file in the hub's own cache. Where the cache is, tokens, mirrors and being
offline are the business of `huggingface_hub` and its variables (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE). Only files that a compile reads are fetched, weights last.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.compiler.files.checkpoint import INDEX_FILE, SINGLE_FILE, read_weight_map
from dovetail.compiler.models.encoder_folder import (
    MODULES,
    SENTENCE_CONFIG,
    is_encoder,
    open_folder,
)
from dovetail.compiler.models.encoder_spec import PROMPTS
from dovetail.compiler.models.merged_adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    base_name,
    is_adapter,
)
from dovetail.compiler.models.source import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION,
    PROCESSOR_TEMPLATE,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from dovetail.compiler.models.spec import read_dimensions
from dovetail.ir.errors import SpecError

SMALL = (
    *(CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS),
    *(CHAT_TEMPLATE, PROCESSOR_TEMPLATE),
    *(MODULES, SENTENCE_CONFIG, PROMPTS, INDEX_FILE),
)
"""Files that are read beside weights, at the top or in the folder of a module (`1_Pooling`)."""
_SMALL_FILE = re.compile(rf"(?:\d+_\w+/)?(?:{'|'.join(map(re.escape, SMALL))})")
_NO_NAME = re.compile(r".*\.(?:gguf|dove|json)", re.IGNORECASE)
_ID = re.compile(
    r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?::(?P<tag>[\w.-]+)|/(?P<file>[^@]+\.gguf))?"
    r"(?:@(?P<revision>[^@\s]+))?"
)
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
_CACHED = re.compile(r"/models--(?P<repository>[^/]+)/snapshots/[^/]+(?P<file>(?:/[^/]+)*)$")
USUAL_TAG = "Q4_K_M"
"""What a repository of several GGUF files gives where none is named, as llama.cpp and Ollama do."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """What an id names. tag: a part of the name of a GGUF file; file: all of it."""

    repository: str
    tag: str | None
    file: str | None
    revision: str | None

    @classmethod
    def read(cls, given: str | os.PathLike[str]) -> HubModel | None:
        """Return what an id names; None for a path: a Path object, or one that is there."""
        found = _ID.fullmatch(given) if isinstance(given, str) else None
        if found is None or Path(str(given)).exists() or _NO_NAME.fullmatch(found["repository"]):
            return None
        return cls(**found.groupdict())

    @property
    def name(self) -> str:
        """The id without the revision: what the model is called wherever it is served."""
        rest = f":{self.tag}" if self.tag else f"/{self.file}" if self.file else ""
        return self.repository + rest.removesuffix(".gguf")


def name_model(given: str | os.PathLike[str]) -> str:
    """Return what a model is called: by its id, also of fetched files, or file or folder."""
    if hub := HubModel.read(given):
        return hub.name
    path = Path(os.path.abspath(given))  # noqa: PTH100 - a link's own name tells what it is
    name = path.name
    if cached := _CACHED.search(_PART.sub("", str(path))):
        name = cached["repository"].replace("--", "/", 1) + cached["file"]
    return name.removesuffix(".dove").removesuffix(".gguf")


def find_model(given: str | os.PathLike[str]) -> Path:
    """Return a path as it is, and where the files of a model of the hub are, fetched if need be.

    A local path of that name goes first. The model that an adapter belongs to is fetched with it.
    Raises SpecError for a model that the hub does not have or does not give, that cannot be
    reached, or that is of no supported family.
    """
    path = _find(given)
    if is_adapter(path):
        _find(base_name(path))
    return path


def find_adapters(named: Mapping[str, str | os.PathLike[str]]) -> dict[str, Path]:
    """Return where each of several adapters is, without the models that they belong to."""
    return {name: _find(given) for name, given in named.items()}


def _find(given: str | os.PathLike[str]) -> Path:
    hub = HubModel.read(given)
    if hub is None:
        return Path(given)
    from huggingface_hub import errors  # noqa: PLC0415 - slow to load

    transport = errors.HTTPError  # type: ignore[attr-defined] # of the library that it speaks HTTP by
    try:
        return _Snapshot.open(hub).fetch()
    except (OSError, ValueError, transport) as error:
        raise SpecError(_explain(hub, error)) from None


def find_models(named: Mapping[str, str | os.PathLike[str]]) -> dict[str, Path]:
    """Return where each of several models is."""
    return {name: find_model(given) for name, given in named.items()}


@dataclass(slots=True)
class _Snapshot:
    """A revision of a repository. sizes: bytes of its files by name.

    away: why the hub did not answer; then the files are those of an earlier fetch. revision: first
    as it was asked for, so that the cache remembers it, then the commit.
    """

    hub: HubModel
    sizes: Mapping[str, int]
    away: Exception | None
    revision: str | None

    @classmethod
    def open(cls, hub: HubModel) -> _Snapshot:
        """List the files at the hub, or those of an earlier fetch where it does not answer."""
        from huggingface_hub import HfApi, errors, snapshot_download  # noqa: PLC0415

        away = None
        try:
            info = HfApi().model_info(hub.repository, revision=hub.revision, files_metadata=True)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]
            here: dict[str, Any] = {"local_files_only": True, "allow_patterns": []}
            try:
                root = snapshot_download(hub.repository, revision=hub.revision, **here)
            except errors.LocalEntryNotFoundError:
                raise error from None
            files = (file for file in Path(root).rglob("*") if file.is_file())
            sizes = {file.relative_to(root).as_posix(): file.stat().st_size for file in files}
            away = error
        return cls(hub, sizes, away, hub.revision)

    def fetch(self) -> Path:
        """Return the model directory or the GGUF file."""
        listed = any(Path(name).name in (SINGLE_FILE, INDEX_FILE) for name in self.sizes)
        if self.hub.tag or self.hub.file or (self._ggufs() and not listed):
            return self._get_all(self._choose_gguf())[0]
        if ADAPTER_CONFIG in self.sizes and not listed:
            names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, *filter(_SMALL_FILE.fullmatch, self.sizes))
            return self._get_all(names)[0].parent
        root = self._get(CONFIG).parent
        self._get_all(name for name in self.sizes if _SMALL_FILE.fullmatch(name))
        if not is_encoder(root):
            read_dimensions(root / CONFIG)  # what no compile would take ends here
        self._get_all(_weights(root))
        return root

    def _get_all(self, names: Iterable[str]) -> list[Path]:
        """Fetch files; say what will take long."""
        wanted = list(names)
        size = sum(self.sizes.get(name, 0) for name in wanted if not self._has(name))
        if size >= 1 << 20:
            said = f"dovetail: fetching {size >> 20} MiB of {self.hub.name}"
            print(said, file=sys.stderr, flush=True)
        return [self._get(name) for name in wanted]

    def _has(self, name: str) -> bool:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

        at = try_to_load_from_cache(self.hub.repository, name, revision=self.revision)
        return isinstance(at, str)

    def _get(self, name: str) -> Path:
        """Return a file, fetched if it is not in the cache, with the hub's own progress bar."""
        from huggingface_hub import hf_hub_download  # noqa: PLC0415

        path = Path(hf_hub_download(self.hub.repository, name, revision=self.revision))
        self.revision = path.parents[name.count("/")].name  # the commit: asked for no more
        return path

    def _ggufs(self) -> dict[str, list[str]]:
        """Return the files of each model by its name without numbers of parts."""
        found: dict[str, list[str]] = {}
        for name in sorted(self.sizes):
            if name.endswith(".gguf") and not Path(name).name.startswith(("mmproj", "imatrix")):
                found.setdefault(_PART.sub("", name), []).append(name)
        return found

    def _choose_gguf(self) -> list[str]:
        """Return the file that is named, the only one, or the usual one; with all its parts."""
        found = self._ggufs()
        if self.hub.file:
            named = [name for name, parts in found.items() if self.hub.file in (name, *parts)]
        else:
            tag = re.escape(self.hub.tag or USUAL_TAG)
            parted = re.compile(rf"(?:^|[-._/]){tag}(?=[-._/]|$)", re.IGNORECASE)
            named = sorted(filter(parted.search, found), key=len)
            named = named or ([*found] if len(found) == 1 and not self.hub.tag else [])
        if not named and self.away:
            raise self.away
        if not named:
            asked = self.hub.file or self.hub.tag
            what = f"no GGUF file {asked}" if asked else f"several GGUF files, none of {USUAL_TAG}"
            files = ", ".join(found) or "none"
            raise SpecError(
                f"{self.hub.repository} has {what}; after its name write :TAG (a part of a file's "
                f"name) or /FILE; it has: {files}"
            )
        return found[named[0]]


def _weights(root: Path) -> list[str]:
    """Return the names of the files with the weights of a fetched folder."""
    opened = open_folder(root)
    index = opened.transformer / INDEX_FILE
    names = set(read_weight_map(index).values()) if index.is_file() else {SINGLE_FILE}
    files = [opened.transformer / name for name in names]
    files += [folder / SINGLE_FILE for folder in opened.dense]
    return sorted(file.relative_to(root).as_posix() for file in files)


def _explain(hub: HubModel, error: Exception) -> str:
    """Return what is wrong, and what to do about it."""
    from huggingface_hub import constants, errors  # noqa: PLC0415

    where = f"{constants.ENDPOINT}/{hub.repository}"
    token = "give a token that may read it by `hf auth login` or HF_TOKEN"
    nowhere = f"there is no local path {hub.name}"
    reasons: dict[type[Exception], str] = {
        errors.GatedRepoError: f"{hub.name} is gated: accept its conditions at {where}, then "
        f"{token}",
        errors.RevisionNotFoundError: f"{hub.repository} has no revision {hub.revision}: {where}",
        errors.RepositoryNotFoundError: f"{nowhere}, and no model at {where}; check the name, or, "
        f"if it is private, {token}",
        errors.EntryNotFoundError: f"{hub.name} is not what Dovetail reads: a {CONFIG} with "
        f"{SINGLE_FILE} (or {INDEX_FILE} and its files), or a GGUF file",
        errors.HFValidationError: f"{nowhere}, and it is no name of a model ({error})",
    }
    away = isinstance(error, errors.LocalEntryNotFoundError)  # the hub, and the file is not here
    for kind, reason in reasons.items():
        if isinstance(error, kind) and not away:
            return reason
    if constants.HF_HUB_OFFLINE:
        return (
            f"{nowhere}, and the model has not been fetched, or not all of it: to do so now "
            "HF_HUB_OFFLINE forbids; unset it once"
        )
    if isinstance(error, errors.HfHubHTTPError) and not away:
        status = error.response.status_code
        remedy = token if status in (401, 403) else "try again later"
        return f"{where} is not given out (HTTP {status}); {remedy}"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot fetch {hub.name}: {error.strerror}: {error.filename}"
    cause = type(error.__cause__ or error).__name__
    return (
        f"{nowhere}, and {constants.ENDPOINT} cannot be reached ({cause}); check the network, or "
        "set HF_ENDPOINT to a mirror"
    )
