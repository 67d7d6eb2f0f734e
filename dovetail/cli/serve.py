"""`dovetail serve`: one OpenAI-compatible port over artifacts, or models that are compiled first.

In: artifacts and model directories; flags, which are environment variables (`DOVETAIL_SERVE_PORT`)
and keys of a YAML file, too. Out: a server, until SIGTERM or Ctrl-C; what runs then ends first.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml  # type: ignore[import-untyped]

from dovetail import __version__
from dovetail.cli.options import (
    ENGINE,
    Device,
    Dtype,
    GpuMemoryUtilization,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Offload,
)
from dovetail.cli.report import Terminated, report_errors
from dovetail.errors import SpecError

ENV = "DOVETAIL_SERVE"
"""Before the names of environment variables."""
NOTHING = ("", "~", "null")
"""What a YAML file says for no value."""
PANEL_MODELS, PANEL_HTTP = "Models", "HTTP"


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the keys of a YAML file as defaults: below flags and environment variables.

    Values are texts, as in the environment: `tune: off` is no boolean. `null` is as no key at all.
    """
    if path is None:
        return None
    known = {parameter.name: parameter for parameter in context.command.params}
    try:
        values = yaml.load(path.read_text(), yaml.BaseLoader) or {}  # makes texts and lists alone
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} is no YAML file: {error}") from None
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from None
    if not isinstance(values, dict):
        raise typer.BadParameter(f"{path} must hold keys with values, such as `port: 8000`")
    named = {key.replace("-", "_"): value for key, value in values.items() if value not in NOTHING}
    unknown = sorted(named.keys() - (known.keys() - {"config"}))
    if unknown:
        raise typer.BadParameter(f"{path}: serve has no flag {', '.join(unknown)}")
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


def flag(name: str, help: str, panel: str = PANEL_HTTP) -> Any:
    """Return an option; every one is an environment variable, too (`ENV`, see `app.py`)."""
    return typer.Option(name, help=help, rich_help_panel=panel)


@report_errors
def serve_command(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Artifacts, or model directories and GGUF files, which are compiled first.",
            envvar=f"{ENV}_MODELS",
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file with flags as keys.",
            callback=read_config,
            is_eager=True,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        flag("--served-model-name", "Ids of the models, in order; repeatable.", PANEL_MODELS),
    ] = None,
    weight_dtype: Annotated[
        str | None,
        flag(
            "--weight-dtype",
            "Of models that are compiled: auto (default), f32, bf16; int8 and int4 quantise.",
            PANEL_MODELS,
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        flag("--calibrate", "A text that int8 or int4 weights are calibrated with.", PANEL_MODELS),
    ] = None,
    kv_dtype: Annotated[
        str | None, flag("--kv-dtype", "Of models that are compiled: f32, bf16, f16.", PANEL_MODELS)
    ] = None,
    workflow: Annotated[
        list[str] | None,
        flag(
            "--workflow",
            "A workflow file, or one of the five; repeatable. Artifacts have theirs.",
            PANEL_MODELS,
        ),
    ] = None,
    index: Annotated[
        list[Path] | None,
        flag("--index", "An index folder for workflows; repeatable.", PANEL_MODELS),
    ] = None,
    nprobe: Annotated[
        int | None, flag("--nprobe", "Clusters that a search scans.", PANEL_MODELS)
    ] = None,
    host: Annotated[str, flag("--host", "Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, flag("--port", "Port to listen on, 0 for any.")] = 8000,
    api_key: Annotated[
        list[str] | None, flag("--api-key", "A key that lets requests in; repeatable.")
    ] = None,
    api_key_file: Annotated[
        Path | None, flag("--api-key-file", "A file of such keys, one in a line.")
    ] = None,
    cors_allow_origin: Annotated[
        list[str] | None, flag("--cors-allow-origin", "Whose pages may call; repeatable.")
    ] = None,
    max_body_bytes: Annotated[int, flag("--max-body-bytes", "Longest body of a request.")] = 16
    << 20,
    body_seconds: Annotated[float, flag("--body-seconds", "A body must come within this.")] = 30.0,
    head_seconds: Annotated[
        float, flag("--head-seconds", "A request's headers must come within this.")
    ] = 15.0,
    ssl_keyfile: Annotated[Path | None, flag("--ssl-keyfile", "Key for TLS.")] = None,
    ssl_certfile: Annotated[Path | None, flag("--ssl-certfile", "Certificate for TLS.")] = None,
    ping_seconds: Annotated[
        float, flag("--ping-seconds", "Silence in a stream before a comment.")
    ] = 15.0,
    drain_seconds: Annotated[
        int, flag("--drain-seconds", "What runs may take so long to end at SIGTERM.")
    ] = 30,
    metrics_prefix: Annotated[
        str, flag("--metrics-prefix", "First part of the names in /metrics.")
    ] = "dovetail",
    tune: Annotated[
        str,
        flag("--tune", "idle: measure schedules of models while nothing is asked.", PANEL_MODELS),
    ] = "off",
    tune_after: Annotated[
        float, flag("--tune-after", "Seconds without requests before that.", PANEL_MODELS)
    ] = 10.0,
    tune_budget: Annotated[
        float | None,
        flag("--tune-budget", "Seconds to measure a model, default a minute.", PANEL_MODELS),
    ] = None,
    timeline: Annotated[
        Path | None, flag("--timeline", "Record requests and steps here for ui.perfetto.dev.")
    ] = None,
    log_requests: Annotated[bool, typer.Option(help="Log a line for each request.")] = True,
    threads: Annotated[
        int | None, flag("--threads", "Threads, default as planned.", ENGINE)
    ] = None,
    kv_blocks: Annotated[int | None, flag("--kv-blocks", "KV blocks of 16 tokens.", ENGINE)] = None,
    device: Device = "auto",
    offload: Offload = "auto",
    dtype: Dtype = "auto",
    gpu_memory_utilization: GpuMemoryUtilization = 0.9,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    max_queue: Annotated[
        int, flag("--max-queue", "Requests that may wait; later ones get 429.", ENGINE)
    ] = 1024,
    embed_slo: Annotated[
        float | None,
        flag("--embed-slo", "Seconds a text may take to embed; else 429.", ENGINE),
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Same bits in any batch, on any threads.",
        ),
    ] = False,
    activations: Annotated[
        str,
        flag(
            "--activations",
            "How they meet quantised weights: integer (8 bits) or float.",
            ENGINE,
        ),
    ] = "integer",
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Run the code of artifacts and indexes that were not made here without a word.",
            envvar=[f"{ENV}_TRUST", "DOVETAIL_TRUST"],
            rich_help_panel=PANEL_MODELS,
        ),
    ] = False,
) -> None:
    """Serve models behind one OpenAI-compatible port."""
    from dovetail.cli.idle_tuning import IdleTuner
    from dovetail.cli.model_cache import TuningJob, find_artifacts, find_untuned
    from dovetail.cli.workflow_files import read_graphs
    from dovetail.loading import load
    from dovetail.runtime.app import App
    from dovetail.runtime.embedding.settings import EmbeddingSettings

    try:
        from dovetail.runtime.server.run import check_address, open_models, serve
        from dovetail.runtime.server.settings import ServeSettings
        from dovetail.runtime.server.traffic import Traffic
        from dovetail.runtime.server.workflows import add_workflows
    except ModuleNotFoundError as error:
        raise SpecError(
            f"the server needs {error.name}; install dovetail with the extra `serve`"
        ) from None

    if tune not in ("off", "idle"):
        raise SpecError(f"--tune must be off or idle, not {tune!r}")
    if tune == "idle" and timeline is not None:
        raise SpecError("a timeline is of one set of schedules; give --timeline or --tune idle")
    if max_queue < 1:
        raise SpecError("--max-queue must be at least 1")
    if (ssl_keyfile is None) != (ssl_certfile is None):
        raise SpecError("TLS needs both --ssl-keyfile and --ssl-certfile")
    settings = ServeSettings(
        host=host,
        port=port,
        api_keys=(*(api_key or ()), *_read_keys(api_key_file)),
        cors_origins=tuple(cors_allow_origin or ()),
        max_body_bytes=max_body_bytes,
        body_seconds=body_seconds,
        head_seconds=head_seconds,
        ping_seconds=ping_seconds,
        drain_seconds=drain_seconds,
        metrics_prefix=metrics_prefix,
        timeline=timeline,
        version=__version__,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
        log_requests=log_requests,
    )
    check_address(settings)
    _write_log()
    options = {
        "weight_dtype": weight_dtype,
        "calibrate": calibrate,
        "kv_dtype": kv_dtype,
        "max_context": max_model_len,
    }
    artifacts = find_artifacts(models, served_model_name or [], options)
    engine: dict[str, Any] = {
        "threads": threads,
        "kv_blocks": kv_blocks,
        "device": device,
        "offload": offload,
        "dtype": dtype,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "max_waiting": max_queue,
    }
    load_one: Callable[[Path], App] = partial(
        load,
        **engine,
        embedding=None if embed_slo is None else EmbeddingSettings(slo=embed_slo),
        deterministic=deterministic,
        activations=activations,
        apart=True,
        trust=trust,
    )
    graphs = [graph for text in workflow or () for graph in read_graphs(text)]
    opened = open_models(artifacts, load_one)
    try:
        add_flows = partial(add_workflows, graphs=graphs, indexes=index or (), nprobe=nprobe)
        flows, traffic = add_flows(opened), Traffic()

        def switch(job: TuningJob) -> None:
            """Serve an artifact; the one it stands in for is closed once nobody uses it."""
            old, app = opened.find(job.name).app, load_one(job.output)
            try:
                found = opened.exchange(job.name, app)
                found.find(job.name).read_texts()  # no request waits for it
                flows.update(add_flows(found))
            except BaseException:
                app.close()
                raise
            opened.take(found)
            traffic.turn().wait()
            old.close()

        with ExitStack() as stack:
            if tune == "idle":
                jobs = find_untuned(models, artifacts, options, tune_budget)
                tuner = IdleTuner(jobs, tune_after, switch)
                stack.callback(tuner.close)
                traffic.watch(tuner)
            stack.enter_context(suppress(Terminated, KeyboardInterrupt))  # sent again by uvicorn
            ready = partial(_say_ready, [*artifacts, *flows])
            serve(opened, settings, workflows=flows, ready=ready, traffic=traffic)
    finally:
        opened.close()


def _say_ready(names: Sequence[str], url: str) -> None:
    print(f"dovetail: serving {', '.join(names)} on {url}", flush=True)


def _read_keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    keys = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    if not keys:
        raise SpecError(f"{path} holds no key; write one in each line")
    return keys


def _write_log() -> None:
    """Send what the program logs to stderr, each line with its time."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("dovetail")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
