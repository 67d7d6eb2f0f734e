"""The settings of a server: what `dovetail serve` has flags for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How a server listens and what it lets in.

    api_keys: a request must carry one of them; none lets everybody in. cors_origins: whose pages
    may read replies. max_body_bytes, body_seconds: of a request's body. head_seconds: a
    request's headers must come within this. ping_seconds: silence in a
    stream before a comment. drain_seconds: what runs may take this long to end when the server
    stops. metrics_prefix: of all names in `/metrics`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    body_seconds: float = 30.0
    head_seconds: float = 15.0
    ping_seconds: float = 15.0
    drain_seconds: int = 30
    metrics_prefix: str = "dovetail"
    version: str = "unknown"
    ssl_keyfile: Path | None = None
    ssl_certfile: Path | None = None
    timeline: Path | None = None
    log_requests: bool = True
