"""A rank with an emulated GPU, as a process in the place of `pair_worker`.

In: what a rank is told, and in the environment the folder with the driver and index of a `Gpu`.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from dovetail.ir.artifact import KernelIndex
from dovetail.ir.errors import DovetailError
from dovetail.runtime.artifact import Artifact, ModelPart
from dovetail.runtime.cuda import CudaDevice
from dovetail.runtime.cuda_pair import CudaPair, GpuParts
from dovetail.runtime.forward import ForwardModel
from dovetail.runtime.orders import PairSetup
from dovetail.runtime.pair_worker import DEVICES, call_parent, open_cuda
from tests.lazy_gpu import ClockedWorker, HostProducts, HostSums, LazyDriver

FOLDER = "DOVETAIL_EMULATED_GPU"
MODULE = "emulated_rank"
ROOT = str(Path(__file__).parents[1])
ENTRY = f"""
import sys
import dovetail.runtime.pair_worker  # before `dovetail` in the root could be taken for it
sys.path.append({ROOT!r})
from tests.cuda_rank import main
main()
"""
"""The text of the module that a process starts with."""
INDEX, DRIVER = "emulated.json", "emulated.so"


def clock_worker(pair: CudaPair, driver: LazyDriver) -> None:
    """Have the thread that attends know the clocks of an emulated GPU."""
    pair.worker.shutdown()
    pair.worker = pair._held.enter_context(ClockedWorker(driver))


def open_emulated(
    setup: PairSetup, artifact: Artifact, part: ModelPart, model: ForwardModel
) -> CudaPair:
    """Return a rank's emulated GPU."""
    assert setup.ordinal == setup.plan.rank  # where all GPUs are on one machine
    folder = Path(os.environ[FOLDER])
    index = msgspec.json.decode((folder / INDEX).read_bytes(), type=KernelIndex)
    driver = LazyDriver(folder / DRIVER, {kernel.name: kernel for kernel in index.kernels})
    products = partial(HostProducts, driver)
    module = folder / "k.ptx", index
    device = CudaDevice(driver=driver)
    parts = GpuParts(device, module, products, HostSums)
    pair = open_cuda(setup, artifact, part, model, parts)
    clock_worker(pair, driver)
    return pair


def main() -> None:
    """Be a rank until the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    DEVICES["cuda"] = open_emulated
    with suppress(DovetailError):  # the parent has been told
        call_parent(os.environ)
