"""A CUDA driver of our own for tests: a library with its C interface, on the CPU.

In: lowered kernels. Out: the library's path. Device memory is the heap, a launch calls the text of
the kernels, compiled as C++, once for each warp of the grid. The device is lost, and all calls
fail, while there is a file that the variable DT_DEAD_GPU names; it never ends what it has begun
while there is one that DT_HUNG_GPU names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dovetail.codegen.emit import KernelSpec, UnitSpec
from dovetail.codegen.emit_cuda import emit_cuda
from dovetail.codegen.targets import DEVICE_TARGETS, host_target
from dovetail.codegen.toolchain import BuildSpec, TranslationUnit, compile_shared
from dovetail.ir.artifact import KernelEntry, KernelIndex
from dovetail.runtime.cuda import CudaDevice
from tests.codegen.warp_host import FLAGS, HEADER

DRIVER = r"""
#include <cstdlib>
#include <unistd.h>

struct dt_kernel { const char* name; void (*run)(void** params); };
static const dt_kernel dt_kernels[] = { KERNELS };
static int dt_busy;  /* allocations and contexts not given back */
static void dt_hang(void) {
  const char* path = getenv("DT_HUNG_GPU");
  while (path && !access(path, F_OK)) usleep(1000);
}
/* what a device that is lost says to all that is asked of it, while there is a file of that name */
static int dt_dead(void) {
  const char* path = getenv("DT_DEAD_GPU");
  return path && !access(path, F_OK) ? 700 : 0;
}

extern "C" {
int dt_left(void) { return dt_busy; }
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* n) { *n = 1; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal + 7; return 0; }
int cuDeviceGetName(char* name, int size, int device) {
  strncpy(name, device == 7 ? "emulated" : "?", size);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = device != 7 ? -1 : attribute == 75 ? 9 : attribute == 76 ? 0 : 132;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) { ++dt_busy; *context = &dt_busy; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { --dt_busy; return device == 7 ? 0 : 101; }
int cuCtxSetCurrent(void* context) { return context == &dt_busy ? 0 : 201; }
int cuCtxSynchronize(void) { return 0; }
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  if (dt_dead()) return dt_dead();
  if (bytes > (size_t)1 << 40) return 2;
  ++dt_busy;
  *address = (uint64_t)aligned_alloc(256, (bytes + 255) / 256 * 256);
  memset((void*)*address, 0xff, bytes);  /* NaN: nobody may count on what is there */
  return 0;
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  ++dt_busy;
  *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return 0;
}
int cuMemFreeHost(void* memory) { --dt_busy; free(memory); return 0; }
int cuMemHostRegister_v2(void*, size_t, unsigned) { ++dt_busy; return 0; }
int cuMemHostUnregister(void*) { --dt_busy; return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, void* from, size_t n, void*) {
  if (dt_dead()) return dt_dead();
  memcpy((void*)to, from, n);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t n, void*) {
  if (dt_dead()) return dt_dead();
  memcpy(to, (void*)from, n);
  return 0;
}
static uint64_t dt_handles;
static int dt_handle(void** handle) { ++dt_busy; *handle = (void*)++dt_handles; return 0; }
int cuStreamCreate(void** stream, unsigned) { return dt_handle(stream); }
int cuStreamDestroy_v2(void*) { --dt_busy; return 0; }
int cuStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cuEventCreate(void** event, unsigned) { return dt_handle(event); }
int cuEventRecord(void*, void*) { return 0; }
int cuEventSynchronize(void*) { dt_hang(); return 0; }
int cuEventDestroy_v2(void*) { --dt_busy; return 0; }
int cuStreamBeginCapture_v2(void*, int) { return 801; }
int cuStreamEndCapture(void*, void**) { return 801; }
int cuGraphInstantiateWithFlags(void** graph, void*, uint64_t) { return dt_handle(graph); }
int cuGraphDestroy(void*) { return 0; }
int cuGraphExecDestroy(void*) { --dt_busy; return 0; }
int cuGraphLaunch(void*, void*) { return 801; }
int cuMemFree_v2(uint64_t address) {
  if (dt_dead()) return dt_dead();
  --dt_busy;
  free((void*)address);
  return 0;
}
int cuMemcpyHtoD_v2(uint64_t to, void* from, size_t n) { memcpy((void*)to, from, n); return 0; }
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t n) { memcpy(to, (void*)from, n); return 0; }
int cuModuleLoadData(void** module, const void* image) {
  if (strncmp((const char*)image, "emulated", 8)) return 200;
  *module = &dt_busy;
  return 0;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void*, const char* name) {
  for (const dt_kernel& kernel : dt_kernels) {
    if (!strcmp(kernel.name, name)) { *function = (void*)&kernel; return 0; }
  }
  return 500;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void* stream, void** params, void** extra) {
  if (dt_dead()) return dt_dead();
  if (gy != 1 || gz != 1 || by != 1 || bz != 1 || shared || extra || bx % 32) return 1;
  for (int64_t warp = 0; warp < (int64_t)gx * (bx / 32); ++warp) {
    dt_host_set(warp, (int64_t)gx * (bx / 32));
    ((const dt_kernel*)function)->run(params);
  }
  return 0;
}
int cuGetErrorString(int status, const char** text) {
  *text = status == 200 ? "device kernel image is invalid" : "refused";
  return 0;
}
}
"""


@contextmanager
def open_device(driver: str) -> Iterator[CudaDevice]:
    """Open the GPU of a driver library; nothing is left on it at the end."""
    device = CudaDevice(library=driver)
    yield device
    device.close()
    assert ctypes.CDLL(driver).dt_left() == 0


def make_index(kernels: Sequence[KernelSpec]) -> KernelIndex:
    entries = tuple(kernel.entry for kernel in kernels)
    return KernelIndex(
        target="cuda", library="k.ptx", source="k.cu", compiler="c", flags=(), kernels=entries
    )


C_TYPES = {"f32": "float", "f64": "double", "i64": "int64_t", "i32": "int32_t"}
POINTED = {**C_TYPES, "bf16": "uint16_t", "f16": "uint16_t"}


def trampoline(entry: KernelEntry) -> str:
    """Return the C++ function that unpacks a launch's parameters."""
    kinds = [
        f"{POINTED[p.type[4:-1]]}*" if p.type.startswith("ptr[") else C_TYPES[p.type]
        for p in entry.params
        if p.kind != "thread"
    ]
    values = ", ".join(f"*({kind}*)params[{i}]" for i, kind in enumerate(kinds))
    return f"static void run_{entry.name}(void** params) {{ dt_cuda_{entry.name}({values}); }}\n"


def build_driver(
    kernels: Sequence[KernelSpec], cache: Path | None = None, flags: Sequence[str] = FLAGS
) -> Path:
    """Return a driver library that knows `kernels`; it does all at once, whatever the stream."""
    text = emit_cuda(UnitSpec("gpu", DEVICE_TARGETS["cuda"], tuple(kernels)))
    entries = [kernel.entry for kernel in kernels]
    table = ", ".join(f'{{"dt_cuda_{e.name}", run_{e.name}}}' for e in entries)
    runs = "".join(map(trampoline, entries))
    header = (Path(__file__).parent / "codegen" / HEADER).read_text(encoding="utf-8")
    spec = BuildSpec(
        name="emulated_gpu",
        target=host_target(),
        files=(("driver.cpp", text + runs + DRIVER.replace("KERNELS", table)), (HEADER, header)),
        units=(TranslationUnit("driver.cpp", tuple(flags)),),
    )
    return compile_shared(spec, cache)
