"""Runs `http_overhead.py`. Python's own package has this name, and finds its place here.

With this folder on the path, `import http` comes to this file first: it puts the package there.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path


def stand_aside() -> None:
    """Load Python's package `http` in place of this module."""
    folder = Path(sysconfig.get_path("stdlib")) / "http"
    spec = importlib.util.spec_from_file_location(
        "http", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["http"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    from http_overhead import main

    main()
else:
    stand_aside()
