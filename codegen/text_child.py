"""The process that lowers some kernels of a library: `python -P -m dovetail.codegen.text_child`.

In: a `TextJob` on stdin. Out: the kernels' texts in the cache, where the parent finds them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from dovetail.codegen.catalog import KernelRequest
from dovetail.codegen.library import remember_kernel
from dovetail.codegen.targets import get_target


class TextJob(msgspec.Struct, frozen=True):
    """What to lower: names of a target and of the cache's folder, and the requests."""

    target: str
    cache: str
    requests: tuple[KernelRequest, ...]


if __name__ == "__main__":
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=TextJob)
    for request in job.requests:
        remember_kernel(get_target(job.target), request, Path(job.cache))
