"""Pages for browsers: chat and dashboard at `/`, the endpoints at `/docs`, and files of both.

In: the files of `web/`. Out: responses whose pages load and call nothing but this server, and run
no script that is not one of these files. They need no key: what they show is asked for with one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import PurePosixPath

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = resources.files("dovetail.runtime.server") / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
NAMED = {"/": "index.html", "/docs": "docs.html"}
"""Pages with an address of their own; they refer to `ui/...`, so that a path may stand before."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def show_file(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers with a file and its headers; a browser that has it is told so."""
    body = (FOLDER / name).read_bytes()
    headers = {**HEADERS, "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}

    async def show(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=TYPES[PurePosixPath(name).suffix])

    return show


def page_routes() -> list[Route]:
    """Return the routes of all pages and their files."""
    files = sorted(path.name for path in FOLDER.iterdir())
    shown = NAMED | {f"/ui/{name}": name for name in files if name not in NAMED.values()}
    return [Route(path, show_file(name)) for path, name in shown.items()]
