"""The third-party kernels of the corpus parse and lift as far as was reached; long."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.lift.unroll import CHOICES
from dovetail.codegen.targets import TARGETS, host_features, runs_on
from tests.repository import ROOT

sys.path.insert(0, str(ROOT))
HERE = runs_on(TARGETS["x86-64-avx512"], platform.machine(), host_features())
NO_CORPUS = not (Path(os.environ.get("DOVETAIL_CORPUS", "../shared")) / "kernels").is_dir()
needs_corpus = pytest.mark.skipif(NO_CORPUS, reason="the corpus of kernels is not here")


@pytest.mark.long
@needs_corpus
def test_most_functions_of_the_corpus_parse_and_lift():
    from benchmarks.lift import kernel_files, measure, summary

    portions = [rows for path in kernel_files() for rows in measure(path, builds=False)]
    rows = [row for portion in portions for row in portion]
    found = summary(rows)
    assert found["functions"] >= 350
    assert found["parse"] >= 0.91
    assert found["lift"] >= 0.71


@pytest.mark.long
@needs_corpus
@pytest.mark.skipif(not HERE, reason="this CPU does not run AVX-512")
@pytest.mark.parametrize(
    ("file", "function"),
    [
        ("f32-gemm-5x8-minmax-fma3-broadcast.c", ""),
        ("qs8-vaddc-minmax-sse41-mul16-ld64-u32.c", ""),
        ("qd8-f32-qc8w-gemm-2x4c8-minmax-avx-ld64.c", ""),
        ("arch__x86__quants.c", "ggml_vec_dot_q8_0_q8_0"),
        ("train_gpt2.c", "attention_forward"),
        ("x86_64__daxpy_microk_skylakex-2.c", ""),
    ],
)
def test_functions_of_the_corpus_compute_what_gcc_makes_of_them(file, function):
    """On two targets, and in vectors where their text has some."""
    from benchmarks.lift import kernel_files, measure, read_file, setting_of

    (path,) = (path for path in kernel_files() if path.name.endswith(file))
    others = {(path.name, f) for f in read_file(path, setting_of(path)).own if function not in f}
    (row,) = (row for rows in measure(path, True, others, vectors=True) for row in rows)
    assert (row.compared, len(row.targets)) == ("same", 2), row
    assert row.vectors[1] > 0 <= row.vectors[0]
    assert row.vectors[0] > 0 or file == "train_gpt2.c"  # plain C


@pytest.mark.skipif(platform.machine() != "x86_64", reason="it reads instructions of x86")
def test_vector_instructions_are_those_of_several_lanes():
    from benchmarks.lift import count_vectors

    text = """
    #include <immintrin.h>
    static __attribute__((noinline)) __m256 twice(__m256 v) { return _mm256_add_ps(v, v); }
    void wide(float *x) { _mm256_storeu_ps(x, twice(_mm256_loadu_ps(x))); }
    void four(float *x) { _mm_storeu_ps(x, _mm_mul_ps(_mm_loadu_ps(x), _mm_loadu_ps(x))); }
    void bytes(__m128i *x) { *x = _mm_maddubs_epi16(*x, *x); }
    void scalar(float *x, int n) { for (int i = 0; i < n; i++) x[i] = x[i] * -x[i] + 1.0f; }
    """
    count = count_vectors(text, ("-O1", "-mavx2"))
    assert (count("four"), count("bytes"), count("scalar")) == (1, 1, 0)
    assert count("wide") > count("twice") > 0


def test_nothing_is_left_in_the_folder_for_temporary_files(tmp_path):
    corpus, temporary = tmp_path / "kernels", tmp_path / "temporary"
    corpus.mkdir()
    temporary.mkdir()
    (corpus / "k.c").write_text("#include <other.h>\n")
    text = (
        "from benchmarks import lift; print(lift.include_folder()); lift.compile_program('', (), 0)"
    )
    environment = {**os.environ, "DOVETAIL_CORPUS": str(tmp_path), "TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, env=environment, capture_output=True, check=True
    )
    assert str(temporary) in done.stdout.decode()
    assert list(temporary.iterdir()) == []


@needs_corpus
def test_most_float_products_are_understood_and_half_of_them_widen():
    from benchmarks.lift import Row, kernel_files, lift_row, read_file, setting_of

    rows, kernels = [], []
    for path in kernel_files():
        if "f32-gemm" in path.name:
            (function,) = (pieces := read_file(path, setting_of(path))).own
            rows.append(Row(path.name, function))
            kernels.append(lift_row(pieces, rows[-1]).unit.function(function))
    assert sum(row.way == "by meaning" for row in rows) >= 8
    assert sum("LANES" in {t.name for t in kernel.tunables} for kernel in kernels) >= 5


@needs_corpus
@pytest.mark.skipif(platform.machine() != "x86_64", reason="gcc builds it for this machine")
def test_llm_c_s_attention_is_built_tuned_and_timed_beside_ours():
    from benchmarks.lift_attention import measure, rows_of

    rows = rows_of(7, 2, measure(7, heads=2, rounds=1))  # which compares all with float64
    tuned = [f"lifted, {count} vectors at a time" for count in CHOICES]
    own = ["gcc -O3 -march=native", "gcc, llm.c's flags", "ours"]
    assert [row["way"] for row in rows] == [*tuned, *own]
    assert all(row["ms"] > 0 < row["times_ours"] for row in rows)
    assert all(row["machine"] and row["commit"] for row in rows)
    assert np.float32(1e-38) / np.float32(4) > 0, "this process takes small numbers for zeros"


@needs_corpus
@pytest.mark.skipif(not HERE, reason="this CPU does not run AVX-512")
def test_a_lifted_product_of_avx2_is_timed_in_both_widths_and_gives_gcc_s_bits():
    from benchmarks.lift_gemm import kernel_files, read_file, rows_of, setting_of

    (path,) = (p for p in kernel_files() if "f32-gemm-3x16-minmax-fma3" in p.name)
    (function,) = read_file(path, setting_of(path)).own
    rows = rows_of(path, function, k=8, columns=20, rounds=1)  # which stops where bits differ
    ways = [row["way"] for row in rows]
    assert ways[:2] == ["gcc's build", "written out"]
    assert ways[2:] == [f"lifted, LANES {n}, UNROLL {u}" for n in (8, 16) for u in CHOICES]
    assert all(row["gflops"] > 0 and row["machine"] and row["commit"] for row in rows)


def test_each_row_of_a_file_says_where_and_what_was_measured(tmp_path, monkeypatch):
    from benchmarks import lift
    from benchmarks.common import origin

    (tmp_path / "own.c").write_text("float twice(float x) { return 2.0f * x; }\n")
    monkeypatch.setattr(lift, "include_folder", lambda: tmp_path)
    ((row,),) = lift.measure(tmp_path / "own.c", builds=False)
    assert row.lifted and {"machine": row.machine, "commit": row.commit} == origin()
    assert origin()["commit"] and "L1" in origin()["machine"]
