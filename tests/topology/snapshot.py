"""Builds a directory that looks like the `/sys` and `/proc` of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@dataclass(frozen=True)
class Machine:
    """`sockets` packages of `cores` cores of `smt` PUs; sibling PUs are `sockets * cores` apart."""

    sockets: int = 1
    cores: int = 2
    smt: int = 1
    online: str = ""
    affinity: str = ""
    flags: str = "fpu sse2 avx avx2 fma f16c"
    extra: Mapping[str, str] = field(default_factory=dict)

    def build(self, root: Path) -> Path:
        total = self.sockets * self.cores * self.smt
        everything = f"0-{total - 1}"
        write(root, self._proc(total, everything))
        cpu = "sys/devices/system/cpu"
        write(root, {f"{cpu}/online": self.online or everything, f"{cpu}/present": everything})
        for pu in range(total):
            write(root, self._pu(f"{cpu}/cpu{pu}", pu))
        for socket in range(self.sockets):
            write(root, self._node(socket))
        write(root, {"sys/devices/system/node/online": f"0-{self.sockets - 1}"})
        write(root, self.extra)
        return root

    def _proc(self, total: int, everything: str) -> dict[str, str]:
        block = "processor\t: {}\nvendor_id\t: Acme\nmodel name\t: Acme 9000\nflags\t\t: {}\n"
        return {
            "proc/cpuinfo": "\n".join(block.format(pu, self.flags) for pu in range(total)),
            "proc/meminfo": "MemTotal:       16384 kB\nMemFree:        1 kB",
            "proc/self/status": f"Name:\tx\nCpus_allowed_list:\t{self.affinity or everything}",
        }

    def _pu(self, folder: str, pu: int) -> dict[str, str]:
        width = self.sockets * self.cores
        core = pu % width
        socket = core // self.cores
        siblings = ",".join(str(core + width * s) for s in range(self.smt))
        shared = ",".join(str(p) for p in self._socket_pus(socket))
        files = {
            "topology/thread_siblings_list": siblings,
            "topology/physical_package_id": str(socket),
        }
        rows = [
            (1, "Data", "48K", siblings),
            (1, "Instruction", "32K", siblings),
            (2, "Unified", "1M", siblings),
            (3, "Unified", "8192K", shared),
        ]
        for index, (level, kind, size, pus) in enumerate(rows):
            base = f"cache/index{index}"
            files |= {
                f"{base}/level": str(level),
                f"{base}/type": kind,
                f"{base}/size": size,
                f"{base}/shared_cpu_list": pus,
                f"{base}/coherency_line_size": "64",
            }
        return {f"{folder}/{name}": text for name, text in files.items()}

    def _node(self, socket: int) -> dict[str, str]:
        base = f"sys/devices/system/node/node{socket}"
        distances = " ".join("10" if s == socket else "21" for s in range(self.sockets))
        return {
            f"{base}/cpulist": ",".join(str(p) for p in self._socket_pus(socket)),
            f"{base}/meminfo": f"Node {socket} MemTotal:       8192 kB",
            f"{base}/distance": distances,
        }

    def _socket_pus(self, socket: int) -> list[int]:
        width = self.sockets * self.cores
        first = range(socket * self.cores, (socket + 1) * self.cores)
        return [core + width * s for s in range(self.smt) for core in first]
