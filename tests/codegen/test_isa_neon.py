"""Every NEON intrinsic's numpy meaning equals the instruction, bit for bit, under qemu."""

import platform
import shutil

import pytest

from dovetail.codegen.targets import TARGETS
from tests.codegen.isa_probe import check_table


def test_meanings_equal_the_instructions(tmp_path):
    native = platform.machine() == "aarch64"
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not native and emulator is None:
        pytest.skip("qemu-aarch64 is not installed (Debian package qemu-user)")
    target = TARGETS["aarch64-neon"]
    command = () if native else (str(emulator),)
    assert not check_table(target, target.intrinsics.values(), tmp_path, command)
