"""Tensor parallelism: the same tokens from 1, 2 and 4 processes, and groups that lose a process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import ArtifactError, RankError, SpecError
from dovetail.runtime.app import load
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.engine.executor import open_on_cpu
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.machine.seat import SEARCH_SLOT, Board, Seat
from dovetail.runtime.native.adapt import deal_cpus
from dovetail.runtime.native.step import PART_TOKENS, StepShape
from dovetail.runtime.schedule.request import SamplingParams
from dovetail.topology.division import DECODE, PREFILL, SEARCHES
from dovetail.topology.hardware import read_hardware
from tests.models import save_model
from tests.processes import running, stop
from tests.runtime.groups import named_memory

ROOT = Path(__file__).parents[1]
HEADS4 = {"num_attention_heads": 4, "num_key_value_heads": 4}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-4kv": ("llama", {**HEADS4, "hidden_size": 64, "intermediate_size": 120}),
    "qwen2-gqa-bias-tied": (
        "qwen2",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,  # of 4 ranks, two keep the same head
            "hidden_size": 128,
            "intermediate_size": 333,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-norms": (
        "qwen3",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "hidden_size": 96,
            "vocab_size": 101,
        },
    ),
    "gemma3-norms": (
        "gemma3",
        {**HEADS4, "head_dim": 16, "hidden_size": 64, "intermediate_size": 120},
    ),
    "gemma2-caps": ("gemma2", {**HEADS4, "head_dim": 16}),
    "apertus": ("apertus", HEADS4),
    "mixtral-experts": (
        "mixtral",
        {**HEADS4, "hidden_size": 64, "intermediate_size": 112, "num_local_experts": 6},
    ),
    "gpt-oss": (
        "gpt_oss",
        {**HEADS4, "hidden_size": 64, "intermediate_size": 112, "num_local_experts": 6},
    ),
    "qwen2-shared": (
        "qwen2_moe",
        {
            **HEADS4,
            "hidden_size": 64,
            "moe_intermediate_size": 112,
            "num_experts": 6,
            "shared_expert_intermediate_size": 72,
            "mlp_only_layers": [0],
        },
    ),
    "hunyuan": ("hunyuan", {**HEADS4, "head_dim": 16, "hidden_size": 64}),
    "cohere2": ("cohere2", {**HEADS4, "hidden_size": 64, "num_hidden_layers": 4}),
    "exaone4-norms": ("exaone4", {**HEADS4, "hidden_size": 64, "num_hidden_layers": 4}),
    "llama-biases-bf16": (
        "llama",
        {**HEADS4, "attention_bias": True, "mlp_bias": True, "dtype": "bfloat16"},
    ),
}
LONG = ("qwen3-norms", "gemma3-norms", "apertus", "exaone4-norms", "qwen2-shared", "hunyuan")
LONG += ("llama-biases-bf16",)
EVERY_DAY = [name for name in CONFIGS if name not in LONG]
PROMPTS = [[1 + (i * 7 + j * 3) % 97 for j in range(n)] for i, n in enumerate((1, 5, 40, 17, 90))]


def plan(processes: int, threads: int = 1, prefill: int = 0) -> ServicePlan:
    phase = PhasePlan(threads=threads, cpus=())
    counts = {"processes": processes, "prefill_processes": prefill}
    return ServicePlan(**counts, prefill=phase, decode=phase, kv_blocks=64)


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            family, config = CONFIGS[name]
            folder = tmp_path_factory.mktemp("parallel") / name
            save_model(folder / "model", family, **config)
            options = {
                "effort": "none",
                "max_step_tokens": 64,
                "max_context": 256,
                "weight_dtype": "f32",
            }
            compile_model(folder / "model", output=folder / "app.dove", **options)
            made[name] = folder / "app.dove"
        return made[name]

    return make


def answers(
    path: Path, service: ServicePlan, prompts: Sequence[list[int]], **options: Any
) -> list[list[int]]:
    with load(path, plan=service, **options) as app:
        done = app.generate(prompts, max_tokens=24, ignore_eos=True)
        return [list(d.token_ids) for d in done]


@pytest.mark.parametrize(
    "name", [*EVERY_DAY, *(pytest.param(n, marks=pytest.mark.long) for n in LONG)]
)
def test_any_number_of_processes_gives_the_same_tokens(
    artifact: Callable[[str], Path], name: str
) -> None:
    """Prompts longer than a step, so that steps mix prefill chunks and decodes."""
    path = artifact(name)
    whole = answers(path, plan(1), PROMPTS)
    assert len({tuple(tokens) for tokens in whole}) > 1
    placed = replace(plan(4), nodes=(0,) * 4)  # each rank's weights and KV on a node
    for service in (plan(2, 2), placed):
        assert answers(path, service, PROMPTS) == whole


PAIRS = (("llama-4kv", (1, 2)), ("llama-4kv", (2, 1)), ("qwen2-gqa-bias-tied", (2, 4)),
         ("qwen3-norms", (4, 2)), ("qwen3-norms", (1, 3)), ("hunyuan", (2, 4)))  # fmt: skip


@pytest.mark.parametrize(("name", "pair"), PAIRS)
def test_the_phases_may_have_different_numbers_of_processes(
    artifact: Callable[[str], Path], name: str, pair: tuple[int, int]
) -> None:
    """KV of one is read by the other, also in steps that mix prompts and decodes."""
    path, (prefill, decode) = artifact(name), pair
    with load(path, plan=plan(1), deterministic=True) as app:
        whole = [d.token_ids for d in app.generate(PROMPTS, max_tokens=24, ignore_eos=True)]
    service = replace(plan(decode, 1, prefill), prefill_token_threshold=8)
    with load(path, plan=service, deterministic=True) as app:
        executor = app.engine.executor
        assert executor.model.prefill.tape != executor.model.decode.tape
        assert len(executor.group.pids) == max(pair) - 1
        found = [d.token_ids for d in app.generate(PROMPTS, max_tokens=24, ignore_eos=True)]
    assert found == whole


@pytest.mark.parametrize("pair", [(2, 2), (1, 2)])
def test_ranks_keep_to_what_other_workers_leave_them(
    artifact: Callable[[str], Path], pair: tuple[int, int]
) -> None:
    path, cpus = artifact("llama-4kv"), sorted(os.sched_getaffinity(0))
    whole = answers(path, plan(1), PROMPTS)
    spread = {2: tuple((cpus * 2)[:2]), 1: (cpus[0],)}
    phases = [PhasePlan(threads=1, cpus=spread[count]) for count in pair]
    service = replace(plan(pair[1], 1, pair[0]), prefill=phases[0], decode=phases[1])
    hardware = read_hardware()
    board = Board()
    board.divide({PREFILL: (cpus[0],), DECODE: (cpus[0],), SEARCHES: (cpus[-1],)})
    other = Seat(board, SEARCH_SLOT)
    other.take(SEARCHES)
    found = open_artifact(path, hardware)
    options = EngineOptions(plan=service)
    engine = open_on_cpu(found, found.models["llm"], hardware, options, board)
    try:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        requests = [engine.submit(prompt, params)[0] for prompt in PROMPTS]
        while engine.scheduler.busy:
            engine.step()
        done = [request.tokens[len(p) :] for request, p in zip(requests, PROMPTS, strict=True)]
        assert done == whole
        assert board.used[DECODE] > 0
    finally:
        engine.close()


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_each_rank_has_a_cpu_of_its_own_while_there_are_enough(
    data: st.DataObject, ranks: int, threads: int
) -> None:
    own = tuple(tuple(range(r * threads, (r + 1) * threads)) for r in range(ranks))
    usable = tuple(sorted(data.draw(st.sets(st.integers(0, ranks * threads + 1), min_size=1))))
    dealt = deal_cpus(own, usable)
    held = [cpu for cpus in dealt for cpu in cpus]
    assert all(dealt) and set(held) <= set(usable)
    assert len(usable) < ranks or len(held) == len(set(held)), "none has to wait for another"


def test_any_number_of_processes_gives_the_same_scores(artifact: Callable[[str], Path]) -> None:
    found = []
    for processes in (1, 2):
        with load(artifact("qwen2-gqa-bias-tied"), plan=plan(processes)) as app:
            found.append([score.logprobs[1:] for score in app.score(PROMPTS)])
    for one, two in zip(*found, strict=True):
        assert two == pytest.approx(one, abs=1e-4)


def test_threads_share_the_heads_of_their_rank(artifact: Callable[[str], Path]) -> None:
    """Two of four KV heads leave half of four threads idle, if keys stay whole."""
    shape = StepShape(1, 0, 1, prefill_tokens=0, decoders=1, longest_decode=200, outputs=())
    for processes, parts in ((1, 1), (2, 2)):
        with load(artifact("llama-4kv"), plan=plan(processes)) as app:
            assert app.engine.executor.kv_splits(shape, 4, PART_TOKENS) == parts


def test_heads_that_cannot_be_shared_are_refused(artifact: Callable[[str], Path]) -> None:
    with pytest.raises(SpecError, match="3 processes"):
        load(artifact("qwen2-gqa-bias-tied"), plan=plan(3))
    with load(artifact("llama-4kv"), plan=plan(3)) as app:  # 1 + 1 + 2 heads
        uneven = app.generate(PROMPTS[2], max_tokens=24, ignore_eos=True)[0].token_ids
    assert list(uneven) == answers(artifact("llama-4kv"), plan(1), PROMPTS[2:3])[0]


def test_a_killed_process_fails_the_request_and_the_next_one_is_served(
    artifact: Callable[[str], Path],
) -> None:
    victim = 1
    path = artifact("llama-4kv")
    expected = answers(path, plan(1), PROMPTS[:2])
    before = named_memory([os.getpid()])  # other programs have some, this one may
    with load(path, plan=plan(4)) as app:
        assert app.engine.executor.group is not None
        pids = app.engine.executor.group.pids
        assert named_memory([os.getpid(), *pids]) == before  # what has no name is no litter
        stream = app.stream(PROMPTS[2], max_tokens=200, ignore_eos=True)
        next(stream)
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises(RankError, match="process"):
            list(stream)
        assert running(pids) == []
        assert app.engine.scheduler.pool.free_blocks == 64 and not app.engine.scheduler.busy
        again = [
            list(d.token_ids) for d in app.generate(PROMPTS[:2], max_tokens=24, ignore_eos=True)
        ]
        assert again == expected
        pids = app.engine.executor.group.pids
        os.kill(pids[victim], signal.SIGKILL)  # while idle: nothing is lost
        os.waitid(os.P_PID, pids[victim], os.WEXITED | os.WNOWAIT)
        assert (
            list(app.generate(PROMPTS[0], max_tokens=24, ignore_eos=True)[0].token_ids)
            == (expected[0])
        )
        pids = app.engine.executor.group.pids
        assert len(running(pids)) == 3
        assert named_memory([os.getpid(), *pids]) == before
    assert running(pids) == []


def test_a_process_killed_inside_a_step_ends_it(artifact: Callable[[str], Path]) -> None:
    """The other ranks wait in a sum for the stopped one; its death must end the native call."""
    with load(artifact("llama-4kv"), plan=plan(2)) as app:
        assert app.engine.executor.group is not None
        (pid,) = app.engine.executor.group.pids
        stop(pid)
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {pid}"])
        with pytest.raises(RankError, match="process"):
            app.generate(PROMPTS[0], max_tokens=4)
        killer.wait()
        assert app.generate(PROMPTS[0], max_tokens=4)[0].finish_reason == "length"


PARENT = """
import os, sys
from tests.test_parallel import plan
from dovetail.runtime.app import load
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.engine.executor import open_on_cpu
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.machine.seat import SEARCH_SLOT, Board, Seat
from dovetail.runtime.native.adapt import deal_cpus
from dovetail.runtime.native.step import StepShape
from dovetail.runtime.schedule.request import SamplingParams
from dovetail.topology.division import DECODE, PREFILL, SEARCHES
from dovetail.topology.hardware import read_hardware
app = load(sys.argv[1], plan=plan(2))
stream = app.stream([1, 2, 3], max_tokens=200, ignore_eos=True)
next(stream)
print(*app.engine.executor.group.pids, flush=True)
for _ in stream:
    sys.stdin.readline()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_its_parent(
    artifact: Callable[[str], Path], number: signal.Signals
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT, str(artifact("llama-4kv"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"},
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    ends = [os.pidfd_open(pid) for pid in pids]
    parent.send_signal(number)
    parent.communicate(timeout=60)
    assert len(pids) == 1
    for end in ends:
        assert select.select([end], [], [], 10)[0], "a rank lives on"
        os.close(end)


def test_an_artifact_changed_since_the_load_is_refused(
    artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "moved.dove"
    artifact("llama-4kv").rename(path)
    try:
        with load(path, plan=plan(2)) as app:
            assert app.engine.executor.group is not None
            path.rename(tmp_path / "away.dove")
            os.kill(app.engine.executor.group.pids[0], signal.SIGKILL)
            os.waitid(os.P_PID, app.engine.executor.group.pids[0], os.WEXITED | os.WNOWAIT)
            with pytest.raises(ArtifactError, match=r"moved\.dove"):
                app.generate(PROMPTS[0])
            (tmp_path / "away.dove").rename(path)
            assert app.generate(PROMPTS[0], max_tokens=2)[0].finish_reason == "length"
    finally:
        path.rename(artifact("llama-4kv"))
