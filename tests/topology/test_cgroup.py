from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.topology.cgroup import CgroupLimits, read_limits
from dovetail.topology.hardware import read_hardware
from tests.topology.snapshot import Machine, write

V2_MOUNT = "30 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"
V1_MOUNTS = "\n".join(
    f"3{i} 31 0:29 / /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{name}"
    for i, name in enumerate(("cpu,cpuacct", "memory", "cpuset"))
)


def test_none(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == CgroupLimits()


def test_version_2_takes_the_tightest_of_the_chain(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/job",
            "proc/self/mountinfo": V2_MOUNT,
            f"{base}/slice/cpu.max": "150000 100000",
            f"{base}/slice/memory.max": "max",
            f"{base}/slice/job/cpu.max": "max 100000",
            f"{base}/slice/job/memory.max": "1048576",
            f"{base}/slice/job/cpuset.cpus.effective": "0-1",
            f"{base}/cpuset.cpus.effective": "0-7",
        },
    )
    assert read_limits(tmp_path) == CgroupLimits(1.5, 1 << 20, (0, 1))


def test_version_1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/x\n2:cpu,cpuacct:/\n1:cpuset:/",
            "proc/self/mountinfo": V1_MOUNTS,
            f"{base}/cpu,cpuacct/cpu.cfs_quota_us": "250000",
            f"{base}/cpu,cpuacct/cpu.cfs_period_us": "100000",
            f"{base}/memory/memory.limit_in_bytes": "9223372036854771712",
            f"{base}/memory/docker/x/memory.limit_in_bytes": "4096",
            f"{base}/cpuset/cpuset.cpus": "2-3",
        },
    )
    assert read_limits(tmp_path) == CgroupLimits(2.5, 4096, (2, 3))


def test_a_mount_below_the_group_is_read_at_its_top(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../other",
            "proc/self/mountinfo": V2_MOUNT.replace(" / ", " /pod/container ", 1),
            "sys/fs/cgroup/cpu.max": "50000 100000",
        },
    )
    assert read_limits(tmp_path).cpu_quota == 0.5


@pytest.mark.parametrize("text", ["max 100000", "-1 100000", "0 0", "", "many few", "100000"])
def test_no_quota(tmp_path: Path, text: str) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cpu.max": text,
        },
    )
    assert read_limits(tmp_path).cpu_quota is None


@pytest.mark.parametrize(("quota", "threads"), [(50000, 1), (100000, 1), (290000, 2), (900000, 4)])
def test_quota_limits_threads(tmp_path: Path, quota: int, threads: int) -> None:
    machine = Machine(
        cores=4,
        extra={
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cpu.max": f"{quota} 100000",
            "sys/fs/cgroup/memory.max": "8192",
        },
    )
    spec = read_hardware(root=machine.build(tmp_path))
    assert (spec.usable_threads, spec.usable_memory) == (threads, 8192)
