from __future__ import annotations

import msgspec

from dovetail.topology.hardware import read_hardware
from dovetail.topology.parameters import default_parameters


def test_class_comes_from_instruction_set_and_size_never_from_names() -> None:
    server = read_hardware("package:2 numa:1 core:16")
    client = read_hardware("package:1 core:8")
    assert default_parameters(server).package_bandwidth.value > 100e9
    assert default_parameters(client).package_bandwidth.value < 50e9
    wide = msgspec.structs.replace(server, arch="x86_64", isa_flags=("avx2", "avx512f"))
    plain = msgspec.structs.replace(wide, isa_flags=("avx2",))
    arm = msgspec.structs.replace(server, arch="aarch64")
    rates = [default_parameters(spec).core_flops.value for spec in (wide, plain, arm)]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 3
    assert default_parameters(plain).latent_size.value == 0
    renamed = msgspec.structs.replace(server, cpu_model="x", cpu_vendor="y", source="z")
    assert default_parameters(renamed) == default_parameters(server)
