"""Which device is taken: what drivers show, what torch was built for, what was asked for."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.ir.errors import DeviceError, RequestError
from dovetail.runtime.machine.devices import DeviceChoice, choose_device, find_torch, parse_device
from dovetail.topology.values import AcceleratorSpec


def here(*names: str) -> tuple[AcceleratorSpec, ...]:
    return tuple(AcceleratorSpec(kind=name[:-1], name=name) for name in names)


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """The folder of a torch that was built for NVIDIA's and Intel's GPUs."""
    folder = tmp_path / "torch"
    (folder / "lib").mkdir(parents=True)
    for name in ("cuda", "xpu"):
        (folder / f"lib/libtorch_{name}.so").touch()
    return folder


@pytest.mark.parametrize(
    ("text", "kind", "index", "name"),
    [
        ("auto", "auto", 0, "auto"),
        ("cpu", "cpu", 0, "cpu"),
        ("torch:cpu", "torch:cpu", 0, "torch:cpu"),
        ("cuda", "cuda", 0, "cuda:0"),
        ("xpu:3", "xpu", 3, "xpu:3"),
        ("npu:12", "npu", 12, "npu:12"),
    ],
)
def test_texts_that_name_devices(text: str, kind: str, index: int, name: str) -> None:
    found = parse_device(text)
    assert (found, found.name) == (DeviceChoice(kind, index), name)
    assert found.beside_cpu == (text != "cpu")


@pytest.mark.parametrize(
    "text", ["", "gpu", "cuda:", "cuda:-1", "cuda:1234", "cpu:0", "CUDA", "torch"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="device is auto, cpu, cuda,"):
        parse_device(text)


@pytest.mark.parametrize(
    ("there", "environ", "wanted"),
    [
        ((), {}, "cpu"),
        (("cuda0", "cuda1"), {}, "cuda:0"),
        (("xpu0", "cuda0"), {}, "cuda:0"),
        (("xpu0",), {}, "xpu:0"),
        (("cuda0", "xpu0"), {"CUDA_VISIBLE_DEVICES": ""}, "xpu:0"),
        (("cuda0",), {"CUDA_VISIBLE_DEVICES": "-1"}, "cpu"),
        (("cuda0",), {"HIP_VISIBLE_DEVICES": ""}, "cpu"),
        ((), {"CUDA_VISIBLE_DEVICES": "0"}, "cpu"),
    ],
)
def test_auto_takes_what_is_there_and_never_torchs_cpu(
    torch: Path, there: tuple[str, ...], environ: dict[str, str], wanted: str
) -> None:
    assert choose_device("auto", here(*there), torch=torch, environ=environ).name == wanted


def test_auto_says_what_to_install_once(
    tmp_path: Path, torch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plain").mkdir()
    for folder in (None, tmp_path / "plain"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = choose_device("auto", here("cuda0"), torch=folder, environ={})
        assert found.name == "cpu" and len(caplog.messages) == 1
        assert "cuda:0 is not used: it needs torch 2.6 or newer, built for cuda" in caplog.text
    caplog.clear()
    assert choose_device("auto", here("npu0", "xpu0"), torch=torch, environ={}).name == "xpu:0"
    assert not caplog.messages


@pytest.mark.parametrize(
    ("text", "environ", "said"),
    [
        ("cuda:2", {}, "no device cuda:2 here .cuda:0 to cuda:1 are."),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "GPU-8a"}, "no device cuda:1 here .cuda:0 is."),
        (
            "cuda",
            {"CUDA_VISIBLE_DEVICES": ""},
            "CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES hides it",
        ),
        ("xpu", {}, "no device xpu:0 here .no driver shows one"),
        ("npu:0", {}, "device npu:0 needs torch .*built for npu; install it"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(
    torch: Path, text: str, environ: dict[str, str], said: str
) -> None:
    there = here("cuda0", "cuda1", "npu0")
    with pytest.raises(DeviceError, match=said):
        choose_device(text, there, torch=torch, environ=environ)


def test_asked_for_devices_that_are_there_are_taken(torch: Path) -> None:
    there = here("cuda0", "cuda1")
    assert choose_device("cuda:1", there, torch=torch, environ={}).name == "cuda:1"
    assert choose_device("cpu", there, torch=None, environ={}).name == "cpu"
    assert choose_device("torch:cpu", (), torch=torch, environ={}).name == "torch:cpu"
    with pytest.raises(DeviceError, match=r"torch:cpu needs torch .*pip install 'dovetail\[gpu\]'"):
        choose_device("torch:cpu", (), torch=None, environ={})


def test_gpus_of_amd_need_a_torch_that_is_built_for_them(torch: Path) -> None:
    amd = (AcceleratorSpec(kind="cuda", name="cuda0", model="AMD gfx90a"),)
    assert choose_device("auto", amd, torch=torch, environ={}).name == "cpu"
    with pytest.raises(DeviceError, match="built for ROCm"):
        choose_device("cuda", amd, torch=torch, environ={})
    (torch / "lib/libtorch_hip.so").touch()
    assert choose_device("auto", amd, torch=torch, environ={}).name == "cuda:0"


def test_torch_is_found_without_being_imported() -> None:
    pytest.importorskip("torch")
    folder = find_torch()
    assert folder is not None and (folder / "version.py").is_file()
    code = (
        "import sys; from dovetail.runtime.machine.devices import find_torch; "
        "assert find_torch() and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
