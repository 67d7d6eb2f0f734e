"""Servers over HTTP as child processes: ours and those of the peers, all with the same endpoint.

In: what is to be served. Out: where it listens, once it answers. Prefix caches are on, as they are
in each of them by default. vLLM wants packages of its own: `DOVETAIL_VLLM` names the Python that
has them, else this one is asked.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.error import URLError

from dovetail.cli.serve_client import ask_model
from dovetail.cli.serve_load import Target
from generate_peers import CONVERTS, modules_missing, programs_missing
from llamacpp import SERVER, find_programs

PATH = "/v1/completions"
HOST = "127.0.0.1"
SERVE = "from dovetail.cli import main; main()"
START_SECONDS = 600.0
"""Within these a peer's server must be ready."""
END_SECONDS = 20.0
"""Within these it ends by itself when it is asked to."""
VLLM = "DOVETAIL_VLLM"
KV_GIB = 2
"""Memory for keys and values, of peers that have to be told."""
DIRECTORY = "directory"
"""What a peer reads: a Hugging Face directory in bfloat16."""


@dataclass(frozen=True, slots=True)
class Listening:
    """A server that is ready: where, its process, and seconds from the command to readiness."""

    host: str
    port: int
    pid: int
    seconds: float

    def target(self, clients: int | None = None) -> Target:
        """Return how its one model is asked, by so many clients at once at most."""
        found = Target(host=self.host, port=self.port, ignore_eos=True, max_concurrency=clients)
        return replace(found, model=ask_model(found)[0])


@contextmanager
def serve_dovetail(*models: Path, options: Sequence[str] = ()) -> Iterator[Listening]:
    """Serve artifacts or models; it says itself when and where it is ready."""
    command = [sys.executable, "-P", "-c", SERVE, "serve", *map(str, models), "--port", "0"]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--no-log-requests", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = next((line for line in process.stdout if " on http://" in line), "")
        seconds = time.perf_counter() - start
        if not line:
            raise SystemExit(f"cannot be served; try `dovetail serve {models[0]}`")
        host, port = line.split()[-1].removeprefix("http://").split(":")
        yield Listening(host, int(port), process.pid, seconds)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@contextmanager
def serve_llamacpp(
    model: Path, threads: int, slots: int, context: int, *options: str
) -> Iterator[Listening]:
    """Serve a GGUF file by `llama-server`; slots: sequences at once, of `context` tokens each."""
    programs = find_programs()
    assert programs is not None, "a peer that is absent is left out"
    command = [programs.path(SERVER), "-m", str(model), "-t", str(threads), "--no-webui"]
    with _polled([*command, "-np", str(slots), "-c", str(slots * context), *options]) as found:
        yield found


@contextmanager
def serve_vllm(model: Path, threads: int, slots: int, context: int) -> Iterator[Listening]:
    """Serve a bfloat16 directory by vLLM's own server."""
    command = [vllm_python(), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    command += [str(model), "--dtype", "bfloat16", "--max-num-seqs", str(slots)]
    command += ["--max-model-len", str(context), "--enable-prefix-caching"]
    command += ["--enable-prompt-tokens-details"]
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus))}
    environment["VLLM_CPU_KVCACHE_SPACE"] = str(KV_GIB)
    environment["OMP_NUM_THREADS"] = str(threads)  # a benchmark may have set one
    with _polled(command, environment) as found:
        yield found


@contextmanager
def serve_openvino(model: Path, threads: int, slots: int, context: int) -> Iterator[Listening]:
    """Serve a GGUF file by OpenVINO GenAI's pipeline, see `openvino_server.py`."""
    program = Path(__file__).with_name("openvino_server.py")
    command = [sys.executable, str(program), str(model), "--threads", str(threads)]
    command += ["--slots", str(slots), "--kv-gib", str(KV_GIB)]
    with _polled(command) as found:
        yield found


def vllm_python() -> str:
    """Return the Python by which vLLM is started."""
    return os.environ.get(VLLM) or sys.executable


def vllm_missing() -> str:
    """Name what lacks for vLLM's server."""
    if not (named := os.environ.get(VLLM)):
        return modules_missing("vllm", *CONVERTS)()
    return modules_missing(*CONVERTS)() if Path(named).is_file() else f"{named} (in {VLLM})"


@dataclass(frozen=True, slots=True)
class PeerServer:
    """A peer that serves. missing: names what lacks for it here.

    serve: takes a model, threads, sequences at once and tokens of each. reads: what it reads where
    all sides are to have weights of a width: a GGUF file of a width, a DIRECTORY, nothing.
    """

    missing: Callable[[], str]
    serve: Callable[[Path, int, int, int], AbstractContextManager[Listening]]
    reads: Callable[[str], str | None]


SERVERS = {
    "llamacpp": PeerServer(programs_missing, serve_llamacpp, str),
    "vllm": PeerServer(vllm_missing, serve_vllm, {"BF16": DIRECTORY}.get),
    "openvino": PeerServer(
        modules_missing("openvino_genai", "openvino_tokenizers"),
        serve_openvino,
        lambda width: "F16" if width == "BF16" else width,  # it refuses files of bfloat16
    ),
}
"""Peers that serve, by name."""


@contextmanager
def _polled(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[Listening]:
    """Start a server on a free port; it is ready when /health says so."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--host", HOST, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
        start_new_session=True,  # its own processes end with it
    )
    try:
        while not _healthy(port):
            if process.poll() is not None or time.perf_counter() - start > START_SECONDS:
                raise SystemExit(f"{command[0]} does not serve")
            time.sleep(0.02)
        yield Listening(HOST, port, process.pid, time.perf_counter() - start)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):  # vLLM may hang while it ends
            process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (URLError, OSError):
        return False
