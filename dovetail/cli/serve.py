"""`dovetail serve`: one OpenAI-compatible port over artifacts, or models that are compiled first.

In: artifacts and model directories; flags, which are environment variables (`DOVETAIL_SERVE_PORT`)
and keys of a YAML file, too. Out: a server, until SIGTERM or Ctrl-C; what runs then ends first.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml  # type: ignore[import-untyped]

from dovetail import __version__
from dovetail.cli.options import (
    Adapters,
    Beside,
    EngineFlags,
    Indexes,
    WeightFlags,
    Workflows,
    beside_options,
    flag_of,
)
from dovetail.cli.report import Terminated
from dovetail.errors import SpecError

if TYPE_CHECKING:
    from dovetail.cli.model_cache import TuningJob
    from dovetail.ir.workflow import Workflow
    from dovetail.runtime.app import App
    from dovetail.runtime.server.context import ServeSettings
    from dovetail.runtime.server.models import Models
    from dovetail.runtime.server.served_workflow import ServedWorkflow

log = logging.getLogger("dovetail.server")

ENV = "DOVETAIL_SERVE"
"""Before the names of environment variables."""
TIMES = ("body_seconds", "head_seconds", "send_seconds", "ping_seconds")
LIMITS = {"max_body_bytes": math.inf, **dict.fromkeys(TIMES, 86_400.0)}
"""Options of a server that must be more than 0, and the most of each: timers take no infinity."""
METRIC_NAME = re.compile("[A-Za-z_:][A-Za-z0-9_:]*")
NOTHING = ("", "~", "null")
"""What a YAML file says for no value."""


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the keys of a YAML file as defaults: below flags and environment variables.

    Values are texts, as in the environment: `tune: off` is no boolean. `null` is as no key at all.
    """
    if path is None:
        return None
    known = {parameter.name: parameter for parameter in context.command.params}
    try:
        values = yaml.load(path.read_text(), yaml.BaseLoader) or {}  # makes texts and lists alone
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise typer.BadParameter(f"{path} is not a YAML file: {error}") from None
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from None
    if not isinstance(values, dict):
        raise typer.BadParameter(f"{path} must hold keys with values, such as `port: 8000`")
    named = {key.replace("-", "_"): value for key, value in values.items() if value not in NOTHING}
    unknown = sorted(named.keys() - (known.keys() - {"config"}))
    if unknown:
        raise typer.BadParameter(f"{path}: `serve` has no option {', '.join(unknown)}")
    defaults = {name: _fit(f"{path}: {name}", known[name], value) for name, value in named.items()}
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _fit(place: str, parameter: Any, value: Any) -> str | list[str]:
    """Return a value of the file as its flag takes it: one text, or a list where it repeats."""
    several = parameter.multiple or parameter.nargs != 1
    texts = value if isinstance(value, list) else [value]
    given = all(isinstance(text, str) and text not in NOTHING for text in texts)
    if not given or (len(texts) != 1 and not several):
        raise typer.BadParameter(f"{place} must be one value{' or a list' if several else ''}")
    return texts if several else texts[0]


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """What is served, and whether its schedules are tuned meanwhile."""

    PANEL = "Models"

    served_model_name: Annotated[
        list[str] | None, "Names of the models in the API, in order; repeatable."
    ] = None
    adapter: Adapters = None
    model: Beside = None
    workflow: Workflows = None
    index: Indexes = None
    nprobe: Annotated[int | None, "Clusters that a search of an index scans."] = None
    tune: Annotated[
        str, "When to measure faster schedules: off, or idle (while there are no requests)."
    ] = "off"
    tune_after: Annotated[float, "Seconds without requests before tuning begins."] = 10.0
    tune_budget: Annotated[
        float | None, "Maximum seconds of measurements per model; default a minute."
    ] = None
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Do not warn before running code of an artifact or index not made here.",
            envvar=[f"{ENV}_TRUST", "DOVETAIL_TRUST"],
        ),
    ] = False

    def check(self, timeline: Path | None) -> None:
        """Raise SpecError for what cannot be meant."""
        if self.tune not in ("off", "idle"):
            raise SpecError(f"--tune must be off or idle, not {self.tune!r}")
        for name in ("tune_after", "tune_budget"):
            if (seconds := getattr(self, name)) is not None and not 0 <= seconds < math.inf:
                raise SpecError(f"{flag_of(name)} must be seconds, 0 or more, not {seconds:g}")
        if self.tune_budget == 0:
            raise SpecError("--tune-budget 0 measures nothing; give more, or omit it for a minute")
        if self.tune == "idle" and timeline is not None:
            raise SpecError("--timeline and --tune idle cannot be combined; omit one of them")
        if timeline and not (timeline.exists() or os.access(timeline.absolute().parent, os.W_OK)):
            raise SpecError(f"--timeline {timeline} is in no folder that can be written to")


@dataclass(frozen=True, kw_only=True)
class HttpFlags:
    """The fields of ServeSettings that have flags."""

    PANEL = "HTTP"

    host: Annotated[str, "Address to listen on."] = "127.0.0.1"
    port: Annotated[int, "Port to listen on; 0 for any free one."] = 8000
    api_key: Annotated[list[str] | None, "Key that clients must send; repeatable."] = None
    api_key_file: Annotated[Path | None, "File with such keys, one per line."] = None
    cors_allow_origin: Annotated[
        list[str] | None, "Web origin that may call the server (CORS); repeatable."
    ] = None
    max_body_bytes: Annotated[int, "Maximum size of a request body."] = 16 << 20
    body_seconds: Annotated[float, "Maximum time for a request body to arrive."] = 30.0
    head_seconds: Annotated[
        float, "Maximum time for request headers, and before for a TLS handshake."
    ] = 15.0
    send_seconds: Annotated[
        float, "Maximum time in which a client takes nothing of its reply; it has gone then."
    ] = 60.0
    ssl_keyfile: Annotated[Path | None, "Private key for TLS."] = None
    ssl_certfile: Annotated[Path | None, "Certificate for TLS."] = None
    ping_seconds: Annotated[
        float, "Send a comment in a stream after this many seconds of silence."
    ] = 15.0
    drain_seconds: Annotated[
        int,
        typer.Option(min=0, help="Maximum time for running requests to finish after SIGTERM."),
    ] = 30
    metrics_prefix: Annotated[str, "Prefix of the names in /metrics."] = "dovetail"
    timeline: Annotated[
        Path | None, "Record requests and steps in this file, for ui.perfetto.dev."
    ] = None
    log_requests: Annotated[bool, "Log one line per request."] = True

    def settings(self) -> ServeSettings:
        """Return the settings of a server; SpecError for what cannot be meant."""
        from dovetail.runtime.server.context import ServeSettings

        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise SpecError("TLS needs both --ssl-keyfile and --ssl-certfile")
        given = dict(vars(self))
        for name, most in LIMITS.items():
            if not given[name] > 0:
                raise SpecError(f"{flag_of(name)} must be more than 0, not {given[name]}")
            if given[name] > most:
                raise SpecError(f"{flag_of(name)} must be at most {most:g}, not {given[name]:g}")
        if not METRIC_NAME.fullmatch(self.metrics_prefix):
            raise SpecError(
                f"--metrics-prefix {self.metrics_prefix!r} cannot begin a metric's name; write "
                "letters, digits and _, such as vllm"
            )
        keys = (*(given.pop("api_key") or ()), *_read_keys(given.pop("api_key_file")))
        if blank := [key for key in keys if not key.strip()]:  # else no key would do, too
            raise SpecError(f"--api-key {blank[0]!r} is no key; give a text, or omit the flag")
        origins = tuple(given.pop("cors_allow_origin") or ())
        return ServeSettings(api_keys=keys, cors_origins=origins, version=__version__, **given)


def serve_command(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Artifacts; or model directories, GGUF files, hub ids, which are compiled first.",
            envvar=f"{ENV}_MODELS",
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with options as keys.", callback=read_config, is_eager=True),
    ] = None,
    *,
    served: ModelFlags,
    weights: WeightFlags,
    http: HttpFlags,
    engine: EngineFlags,
    kv_blocks: Annotated[int | None, "Size of the CPU's KV pool, in blocks of 16 tokens."] = None,
    kv_file: Annotated[
        str | None, "Keep KV of what prompts begin with in this file, beyond restarts (1 GiB)."
    ] = None,
    max_queue: Annotated[int, "Maximum waiting generations and workflows; 429 for more."] = 1024,
    embed_slo: Annotated[
        float | None, "Maximum seconds to embed a text; refuse with 429 what would take longer."
    ] = None,
) -> None:
    """Serve models behind one OpenAI-compatible port."""
    from dovetail.cli.model_cache import find_artifact, find_artifacts, find_untuned
    from dovetail.cli.workflow_files import read_graphs
    from dovetail.compiler.models.hub import find_model, name_model
    from dovetail.loading import load
    from dovetail.runtime.embed.settings import EmbeddingSettings
    from dovetail.runtime.engine.options import EngineOptions
    from dovetail.runtime.flows.service import FlowSettings
    from dovetail.runtime.hosting.memory import divide_memory
    from dovetail.runtime.hosting.worker import log_to_stderr
    from dovetail.runtime.index.manifest import read_manifest
    from dovetail.runtime.server.run import check_address, open_models

    served.check(http.timeline)
    if max_queue < 1:
        raise SpecError("--max-queue must be at least 1")
    settings = http.settings()
    embedding = None if embed_slo is None else EmbeddingSettings(slo=embed_slo)
    asked = EngineOptions(**vars(engine), kv_blocks=kv_blocks)  # before a model is compiled
    check_address(settings)
    graphs = [graph for text in served.workflow or () for graph in read_graphs(text)]
    for index in served.index or ():
        read_manifest(index)  # it is told before a model is compiled where there is none
    log_to_stderr(logging.INFO)
    options = _compile_options(models, served, weights, engine)
    given = served.served_model_name or []
    names = [*given, *(name_model(model) for model in models[len(given) :])]
    sources = [find_model(model) for model in models]
    artifacts = find_artifacts(sources, names, options)
    if asked.draft is not None:
        asked = replace(asked, draft=str(find_artifact(asked.draft, {})))
    shares = divide_memory(artifacts, asked, embedding)  # before one is loaded
    load_any = partial(
        load,
        **{**vars(engine), "draft": asked.draft},
        kv_blocks=kv_blocks,
        kv_file=kv_file,
        max_waiting=max_queue,
        workflows=FlowSettings(max_waiting=max_queue),
        embedding=embedding,
        apart=True,
        trust=served.trust,
    )

    def load_one(name: str, path: Path) -> App:
        return load_any(path, memory=shares[name])

    opened = open_models(artifacts, load_one)
    try:
        jobs = []
        if served.tune == "idle":
            jobs = find_untuned(sources, artifacts, options, served.tune_budget)
        _serve(Served(opened, graphs, load_one, served), settings, [*artifacts], jobs)
    finally:
        opened.close()


def _compile_options(
    models: Sequence[str], served: ModelFlags, weights: WeightFlags, engine: EngineFlags
) -> dict[str, Any]:
    """Return how models that are no artifacts are compiled."""
    for flag in ("adapter", "model"):
        if getattr(served, flag) and len(models) > 1:
            raise SpecError(f"--{flag} is for one model; compile each with its own")
    options = weights.chosen() | beside_options(served.adapter, served.model)
    if engine.max_model_len is not None:
        options["max_context"] = engine.max_model_len
    return options


class Served:
    """What a server has behind its names; models can be replaced while it runs."""

    def __init__(
        self,
        models: Models,
        graphs: Sequence[Workflow],
        load_one: Callable[[str, Path], App],
        flags: ModelFlags,
    ) -> None:
        """Raises as `add_workflows`."""
        from dovetail.runtime.server.context import Traffic

        self.models, self.flags = models, flags
        self._graphs, self._load_one = graphs, load_one
        self.flows, self.traffic = self._add_flows(models), Traffic()

    def switch(self, job: TuningJob) -> None:
        """Serve the artifact of `job`; close the one that it replaces once nobody uses it."""
        old, app = self.models.find(job.name).app, self._load_one(job.name, job.output)
        try:
            found = self.models.exchange(job.name, app)
            found.find(job.name).read_texts()  # no request waits for it
            self.flows.update(self._add_flows(found))
        except BaseException:
            app.close()
            raise
        self.models.take(found)
        self.traffic.wait_for(self.traffic.under_way())
        old.close()

    def _add_flows(self, models: Models) -> dict[str, ServedWorkflow]:
        from dovetail.runtime.server.served_workflow import add_workflows

        return add_workflows(models, self._graphs, self.flags.index or (), self.flags.nprobe)


def _serve(
    served: Served, settings: ServeSettings, names: Sequence[str], jobs: Sequence[TuningJob]
) -> None:
    """Run the server until a signal; jobs: what to tune while it is idle."""
    from dovetail.cli.idle_tuning import IdleTuner
    from dovetail.runtime.server.run import serve

    with ExitStack() as stack:
        if served.flags.tune == "idle":
            tuner = IdleTuner(jobs, served.flags.tune_after, served.switch)
            stack.callback(tuner.close)
            served.traffic.watch(tuner.busy, tuner.idle)
        stack.enter_context(suppress(Terminated, KeyboardInterrupt))  # sent again by uvicorn
        for text in served.flags.workflow or ():
            _tell_of_chat(served.flows.get(text), text)
        shown = ", ".join([*names, *served.flows])
        serve(
            served.models,
            settings,
            workflows=served.flows,
            ready=lambda url: print(f"dovetail: serving {shown} on {url}", flush=True),
            traffic=served.traffic,
        )


def _tell_of_chat(flow: ServedWorkflow | None, text: str) -> None:
    """Say where one of the five shows plain text to a model that was trained to chat."""
    from dovetail.cli.workflow_files import CHAT
    from dovetail.workflows import BUNDLED

    if flow and text in BUNDLED and flow.model.app.generator.template:
        log.info("%s has the model continue plain text; %s%s asks in messages", text, text, CHAT)


def _read_keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    text = os.fsdecode(path.read_bytes())  # of any bytes, as keys of the environment are
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise SpecError(f"{path} has no keys; write one per line")
    return keys
