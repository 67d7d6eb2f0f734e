from __future__ import annotations

import ctypes
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dovetail.errors import ArtifactError
from dovetail.ffi import kernels
from tests.dovetail.commands import assert_one_sentence, dovetail

SAXPY = '''
"""A scaled sum."""


@kernel
def saxpy(N: i64, a: f32, x: ptr[f32], y: ptr[f32]):
    """Store a x + y in y, in vectors of U registers."""
    U: param = choice(1, 2, default=1)
    for i in vrange(N):
        vstore(y + i, vfma(vbroadcast(a), vload(x + i), vload(y + i)))
'''
SUM_C = """
#include <stdint.h>
void add(int64_t n, const FLOAT *a, const FLOAT *b, FLOAT *c) {
  for (int64_t i = 0; i < n; i++) {
    c[i] = a[i] + b[i];
  }
}
"""


@pytest.fixture
def saxpy(tmp_path: Path) -> Path:
    path = tmp_path / "saxpy.dk"
    path.write_text(SAXPY)
    return path


@pytest.fixture
def add_c(tmp_path: Path) -> Path:
    path = tmp_path / "add.c"
    path.write_text(SUM_C)
    (tmp_path / "prelude.h").write_text("#define FLOAT float\n")
    return path


def test_check_passes(saxpy: Path) -> None:
    result = dovetail("kernel", "check", saxpy)
    assert (result.code, result.err) == (0, "")
    assert "saxpy" in result.out


@pytest.mark.parametrize(
    "target", ["x86-64-avx2", "x86-64-avx512", "aarch64-neon", "generic", "cuda"]
)
def test_check_lowers_to_any_target(saxpy: Path, target: str) -> None:
    report = json.loads(dovetail("kernel", "check", saxpy, "--target", target, "--json").out)
    assert (report["ok"], report["kernels"], report["faults"]) == (True, ["saxpy"], [])


def test_check_shows_the_place_and_exits_1(saxpy: Path) -> None:
    saxpy.write_text(SAXPY.replace("vload(x + i)", "vlaod(x + i)"))
    result = dovetail("kernel", "check", saxpy)
    assert result.code == 1
    assert "saxpy.dk:10:" in result.out and "^" in result.out and "vlaod" in result.out
    report = json.loads(dovetail("kernel", "check", saxpy, "--json").out)
    assert [(f["line"], report["ok"]) for f in report["faults"]] == [(10, False)]


def test_check_of_c_with_a_prelude(add_c: Path) -> None:
    prelude = add_c.with_name("prelude.h")
    result = dovetail("kernel", "check", add_c, "--prelude", prelude)
    assert (result.code, result.err) == (0, "")
    assert dovetail("kernel", "check", add_c).code == 1  # FLOAT is unknown without it


def test_build_gives_a_library_that_computes(saxpy: Path, tmp_path: Path) -> None:
    out = tmp_path / "lib"
    result = dovetail("kernel", "build", saxpy, "--target", "generic", "-o", out, "--set", "U=2")
    assert result.code == 0, result.err
    index = json.loads((out / "index.json").read_text())
    assert index["kernels"][0]["binding"] == {"U": 2}
    assert "saxpy" in (out / index["source"]).read_text()
    function = ctypes.CDLL(str(out / index["library"])).saxpy
    function.argtypes = (ctypes.c_int64, ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p)
    x, y = np.arange(37, dtype=np.float32), np.ones(37, np.float32)
    function(37, 2.0, x.ctypes.data, y.ctypes.data)
    assert np.array_equal(y, 2 * np.arange(37, dtype=np.float32) + 1)
    again = dovetail("kernel", "build", saxpy, "--target", "generic", "-o", out)
    assert again.code == 0  # a library is replaced, nothing else is
    assert json.loads((out / "index.json").read_text())["kernels"][0]["binding"] == {"U": 1}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_lift_makes_text_that_checks(add_c: Path, tmp_path: Path) -> None:
    lifted = tmp_path / "add.dk"
    prelude = add_c.with_name("prelude.h")
    result = dovetail("kernel", "lift", add_c, "--prelude", prelude, "-o", lifted)
    assert result.code == 0, result.err
    assert dovetail("kernel", "lift", add_c, "--prelude", prelude).out == lifted.read_text()
    assert dovetail("kernel", "check", lifted, "--target", "aarch64-neon").code == 0


def test_one_function_of_a_program_with_several_preludes_and_headers(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b/real.h").write_text("typedef REAL real;\n")
    (tmp_path / "first.h").write_text("#define REAL float\n")
    (tmp_path / "second.h").write_text(
        "#define TWICE(x) JOIN((x) +, (x))\n#define JOIN(a, b) a b\n"
    )
    text = (
        '#include "real.h"\nvoid say(real *x) { puts("x"); }\n'
        "void twice(real *x, int n) { for (int i = 0; i < n; i++) x[i] = TWICE(x[i]); }\n"
        "void once(real *x) { x[0] = 1; }\n"
    )
    (tmp_path / "own.c").write_text(text)
    usual = ("lift", tmp_path / "own.c", "--prelude", tmp_path / "first.h")
    usual = (*usual, "--prelude", tmp_path / "second.h", "--include", tmp_path / "a")
    asked = (*usual, "-I", tmp_path / "b", "--function", "twice", "--function", "once")
    result = dovetail("kernel", *asked)
    assert result.code == 0 and result.out.count("@kernel") == 2, result.err
    assert "def twice(x: ptr[f32], n: i64)" in result.out and "def say" not in result.out
    assert "strings" in dovetail("kernel", *asked[:-4]).err  # all of the file
    assert "`real`" in dovetail("kernel", *usual, "--function", "once").err


def test_a_text_whose_code_is_left_out_says_so(tmp_path: Path) -> None:
    file, out = tmp_path / "own.c", tmp_path / "o"
    file.write_text("#if defined(__NEVER__)\nvoid f(float *x) { x[0] = 1; }\n#endif\n")
    for words in (("check", file), ("lift", file), ("build", file, "-o", out)):
        result = dovetail("kernel", *words)
        assert result.code > 0 and "no function is left of this text" in result.out + result.err
    assert not out.exists()


def test_bad_input_is_one_sentence_and_exit_2(saxpy: Path, add_c: Path, tmp_path: Path) -> None:
    binary = tmp_path / "binary.c"
    binary.write_bytes(b"\xff\xfe\x00")
    taken = tmp_path / "taken"
    taken.mkdir()
    nothing = tmp_path / "nothing.dk"
    nothing.write_text('"""No kernel."""\n')
    cases: list[tuple[object, ...]] = [
        ("check", tmp_path / "missing.dk"),
        ("check", tmp_path),
        ("check", binary),
        ("check", saxpy, "--target", "z80"),
        ("check", saxpy, "--prelude", tmp_path / "missing.h"),
        ("build", saxpy, "-o", taken),
        ("build", saxpy, "-o", tmp_path / "o", "--kernel", "other"),
        ("build", saxpy, "-o", tmp_path / "o", "--set", "U"),
        ("build", saxpy, "-o", tmp_path / "o", "--set", "U=3"),
        ("build", saxpy, "-o", tmp_path / "o", "--set", "U=--2"),
        ("build", saxpy, "-o", tmp_path / "o", "--set", "V=1"),
        ("build", saxpy, "-o", "/proc/nowhere/o"),
        ("build", nothing, "-o", tmp_path / "o"),
        ("lift", add_c, "--prelude", add_c.with_name("prelude.h"), "-o", "/proc/add.dk"),
        ("lift", saxpy),
    ]
    for case in cases:
        assert_one_sentence(dovetail("kernel", *case))
    assert not (tmp_path / "o").exists()


def test_an_output_that_cannot_be_written_is_told_before_the_work(
    saxpy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which could not be done here: there is no compiler, and what is to be lifted is no C."""
    monkeypatch.setenv("DOVETAIL_CC", "/nonexistent/cc")
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    for case in (("build", "/proc/o"), ("lift", "/proc/o.dk"), ("lift", tmp_path)):
        verb, output = case
        result = dovetail("kernel", verb, saxpy, "-o", output)
        assert_one_sentence(result)
        assert f"cannot write {output}: " in result.err


def test_a_kernel_may_be_called_as_one_of_ours(tmp_path: Path) -> None:
    """Ours is checked for the sizes of its own parameters, which another one does not have."""
    file = tmp_path / "norm.dk"
    file.write_text(
        "@kernel\ndef rmsnorm(n: i64, x: ptr[f32], w: ptr[f32]):\n"
        "    for i in vrange(n):\n        vstore(x + i, vmul(vload(x + i), vload(w + i)))\n"
    )
    result = dovetail("kernel", "build", file, "--target", "generic", "-o", tmp_path / "o")
    assert result.code == 0, result.err
    index = json.loads((tmp_path / "o/index.json").read_text())
    assert index["kernels"][0]["family"] == "norm.rmsnorm"


def test_no_compiler_is_one_sentence(
    saxpy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_CC", "/nonexistent/cc")
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    result = dovetail("kernel", "build", saxpy, "-o", tmp_path / "o")
    assert result.code == 2 and "/nonexistent/cc" in result.err
    assert not (tmp_path / "o").exists()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed (CUDA toolkit)")
def test_build_for_cuda_gives_a_module_with_its_text(saxpy: Path, tmp_path: Path) -> None:
    out = tmp_path / "lib"
    result = dovetail("kernel", "build", saxpy, "--target", "cuda", "-o", out)
    assert result.code == 0, result.err
    index = json.loads((out / "index.json").read_text())
    assert (index["target"], index["kernels"][0]["warps"]) == ("cuda", 8)
    assert b".target sm_75" in (out / index["library"]).read_bytes()
    assert "dt_cuda_saxpy(int64_t N" in (out / index["source"]).read_text()
    with pytest.raises(ArtifactError, match="holds kernels for cuda"):
        kernels(out)


def test_no_cuda_compiler_is_one_sentence(
    saxpy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_NVCC", "/nonexistent/nvcc")
    result = dovetail("kernel", "build", saxpy, "--target", "cuda", "-o", tmp_path / "o")
    assert_one_sentence(result)
    assert "pip install nvidia-cuda-nvrtc" in result.err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("name", ["memcpy", "index", "double", "read", "dt_abi"])
def test_a_kernel_that_is_called_as_something_of_c_is_refused(
    saxpy: Path, tmp_path: Path, name: str
) -> None:
    saxpy.write_text(SAXPY.replace("def saxpy", f"def {name}"))
    result = dovetail("kernel", "build", saxpy, "--target", "generic", "-o", tmp_path / "o")
    assert_one_sentence(result)
    assert f"C has its own {name}" in result.err
