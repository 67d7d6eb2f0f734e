"""The warning, given once, before code of others runs: that of an artifact or an index.

In: the folder that is about to be loaded. Out: a line in the log, unless it is known or trusted.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from dovetail.ir.errors import ArtifactError
from dovetail.ir.files import open_regular
from dovetail.ir.trust import is_known, remember

TRUST = "DOVETAIL_TRUST"
"""Set to 1, it silences the warning, as `load(trust=True)` does."""

log = logging.getLogger("dovetail")


def check_trust(folder: Path, *, trust: bool = False, code: str = "native code") -> None:
    """Warn of the first load of `folder`, which has a manifest, unless it was made here.

    code: what it is about to run.
    """
    manifest = read_manifest_bytes(folder)
    if is_known(manifest):
        return
    if not trust and os.environ.get(TRUST, "0") in ("", "0"):
        log.warning(
            "%s was not made here: loading it runs its %s with all your permissions; load it only "
            "if you trust its source (shown once; --trust or %s=1 hides this warning)",
            folder,
            code,
            TRUST,
        )
    remember(manifest)


def is_known_folder(folder: Path) -> bool:
    """Tell whether an artifact or index was made or loaded here before."""
    return is_known(read_manifest_bytes(folder))


def read_manifest_bytes(folder: Path) -> bytes:
    """Return the bytes of the manifest; ArtifactError where they cannot be read."""
    path = folder / "manifest.json"
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from None
