"""Runs a server until it is told to stop: sockets, TLS, draining.

In: the artifacts' names and paths, and settings. Out: nothing; it returns when all requests have
ended, or `drain_seconds` after SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from dovetail.ir.errors import SpecError
from dovetail.runtime.app import App
from dovetail.runtime.server.app import make_app
from dovetail.runtime.server.context import ServerContext, ServeSettings, Traffic
from dovetail.runtime.server.models import Models, ServedModel
from dovetail.runtime.server.protocol import BoundedProtocol
from dovetail.runtime.server.served_workflow import ServedWorkflow
from dovetail.runtime.server.timeline import recording

YOUNG_OBJECTS = 20_000
"""New objects after which garbage is collected. Python's own 700 come with each few requests, whose
objects all live on then and are looked at in vain."""

KEEP_ALIVE_SECONDS = 30
"""Of a connection without requests."""

log = logging.getLogger("dovetail.server")


def open_models(artifacts: Mapping[str, Path], load: Callable[[str, Path], App]) -> Models:
    """Return the artifacts as served models under their ids; all are closed where one fails."""
    opened: list[ServedModel] = []
    try:
        for name, path in artifacts.items():
            opened.append(ServedModel(name, load(name, path)))
            opened[-1].read_texts()
        return Models(opened)
    except BaseException:
        for model in opened:
            model.app.close()
        raise


def check_address(settings: ServeSettings) -> None:
    """Raise SpecError where the address cannot be listened on: before models are loaded for it."""
    _listen(settings).close()


def serve(
    models: Models,
    settings: ServeSettings,
    *,
    workflows: Mapping[str, ServedWorkflow],
    ready: Callable[[str], None],
    traffic: Traffic | None = None,
) -> None:
    """Serve models and workflows until a signal comes; `ready` gets the URL when it has begun.

    `traffic` is told of requests; whoever holds it may have the models `take` others meanwhile.

    Raises SpecError where the address cannot be listened on or TLS files are wrong.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is an open file
    context = ServerContext(models, settings, workflows, traffic=traffic or Traffic())
    with _listen(settings) as listening:
        scheme = "https" if settings.ssl_certfile else "http"
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        config = uvicorn.Config(
            make_app(context),
            http=partial(BoundedProtocol, head_seconds=settings.head_seconds),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            ws="none",
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=settings.drain_seconds,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
        )
        try:
            config.load()
        except OSError as error:
            raise SpecError(f"the TLS files cannot be used: {error}") from None
        server = _Server(config, context, lambda: ready(f"{scheme}://{shown}:{port}"))
        _keep_apart(models)
        for model in models:
            if "generate" in model.skills:  # else the first form asked for would wait a second
                model.app.generator.forms.warm()
        gc.collect()
        gc.freeze()  # what is there stays: later collections need not look at it
        gc.set_threshold(YOUNG_OBJECTS)
        with recording(models, settings.timeline) as context.timeline:
            server.run(sockets=[listening])


class _Server(uvicorn.Server):
    """Tells when it is ready, and the health check when it is to stop."""

    def __init__(
        self, config: uvicorn.Config, context: ServerContext, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._context, self._ready = context, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. uvicorn itself would give a TLS handshake a minute, and has no setting for it."""
        config, loop = self.config, asyncio.get_running_loop()
        protocol: Any = config.http_protocol_class
        make = partial(
            protocol,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.servers = [
            await loop.create_server(
                make,
                sock=each,
                backlog=config.backlog,
                ssl=config.ssl,
                ssl_handshake_timeout=self._context.settings.head_seconds if config.ssl else None,
            )
            for each in sockets or ()
        ]
        self.started = True
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        log.info(
            "%s: stopping: no new requests; waiting for running ones", signal.Signals(sig).name
        )
        self._context.draining = True
        super().handle_exit(sig, frame)


def _keep_apart(models: Models) -> None:
    """Keep this thread, the event loop's, off the CPUs of engines where there are others.

    That is off all of them, or else off those of decodes, which run most of the time.
    """
    plans = [m.app.generator.host.service for m in models if "generate" in m.skills]
    decode = {cpu for plan in plans for cpu in plan.decode.cpus}
    prefill = {cpu for plan in plans for cpu in plan.prefill.cpus}
    allowed = os.sched_getaffinity(0)
    apart = allowed - decode - prefill or allowed - decode
    if apart and decode:
        os.sched_setaffinity(0, apart)


def _listen(settings: ServeSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server(
            (settings.host, settings.port), family=family, backlog=2048, reuse_port=False
        )
        # what it accepts has this, too: the system ends a connection whose client takes nothing
        most = math.ceil(settings.send_seconds * 1000)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most)
        return listening
    except (OSError, OverflowError, TypeError) as error:  # the last: no name of a host
        place = f"{settings.host}:{settings.port}"
        why = str(getattr(error, "strerror", None) or error)
        why = why.partition(" (while")[0]  # Python names the address once more
        raise SpecError(
            f"cannot listen on {place} ({why}); choose another --host or --port"
        ) from None
