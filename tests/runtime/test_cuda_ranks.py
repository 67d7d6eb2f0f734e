"""Two ranks with a GPU each give the tokens of the CPU, and a group that loses one goes on.

The GPUs are emulated (`tests/lazy_gpu.py`), sums are gloo's; NCCL was never run.
"""

from __future__ import annotations

import os
import signal

import pytest

from dovetail.ir.errors import RankError
from dovetail.runtime import pair_group
from tests import cuda_rank
from tests.runtime.cuda_gpu import ASKED, PROMPTS, Gpu


@pytest.fixture(autouse=True)
def emulated(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks started with an emulated GPU of their own."""
    (gpu.folder / f"{cuda_rank.MODULE}.py").write_text(cuda_rank.ENTRY)
    paths = [os.environ.get("PYTHONPATH", ""), str(gpu.folder)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv(cuda_rank.FOLDER, str(gpu.folder))
    monkeypatch.setattr(pair_group, "WORKER", cuda_rank.MODULE)


@pytest.mark.parametrize(
    ("offload", "blocks", "cpu"),
    [
        ("auto", 7, 14),
        pytest.param("off", 9, 1, marks=pytest.mark.long),
        pytest.param("full", 1, 9, marks=pytest.mark.long),
    ],
)
def test_the_tokens_are_those_of_the_cpu(
    gpu: Gpu, alone: list[tuple[int, ...]], offload: str, blocks: int, cpu: int
) -> None:
    choices = {"offload": offload, "min_gain": 0.0, "patience": 4}
    with gpu.load(blocks, cpu, ranks=2, **choices) as running:
        spec, share = running.engine.spec, running.engine.gpu
        assert share.spec.n_kv_heads * 2 == spec.n_kv_heads
        assert share.weights.held["layers.0.qkv"].n * 2 == spec.qkv_size
        assert share.weights.held["layers.0.down"].k < spec.intermediate_size
        assert running.tokens(PROMPTS[:6], max_tokens=8) == [tokens[:8] for tokens in alone[:6]]
    on_cpu = any(batch.cpu_decode for plan in running.plans for batch in plan.batches)
    on_gpu = any(batch.gpu_decode for plan in running.plans for batch in plan.batches)
    assert (on_gpu, on_cpu) == (offload != "full", offload != "off")
    assert running.driver.ledger.checked > 1000
    if offload == "auto":
        assert any(plan.moves or len(plan.batches) > 1 for plan in running.plans)


@pytest.mark.long
def test_requests_of_a_rank_that_died_fail_and_the_next_ones_are_served(
    gpu: Gpu, alone: list[tuple[int, ...]]
) -> None:
    with gpu.load(30, 30, ranks=2, min_gain=0.0) as running:
        group = running.engine.group
        assert group is not None
        job = running.app.submit(PROMPTS[0], **ASKED | {"max_tokens": 150})
        next(iter(job))
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1 of 2 .*killed by signal 9 \(SIGKILL\)"):
            job.result()
        assert running.tokens(PROMPTS[:2]) == alone[:2]
