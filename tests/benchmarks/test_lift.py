"""The third-party kernels of the corpus parse and lift as far as was reached; long."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT

sys.path.insert(0, str(ROOT))


@pytest.mark.long
def test_most_functions_of_the_corpus_parse_and_lift():
    if not (Path(os.environ.get("DOVETAIL_CORPUS", "../shared")) / "kernels").is_dir():
        pytest.skip("the corpus of kernels is not here")
    from benchmarks.lift import kernel_files, measure, summary

    portions = [rows for path in kernel_files() for rows in measure(path, builds=False)]
    rows = [row for portion in portions for row in portion]
    found = summary(rows)
    assert found["functions"] >= 350
    assert found["parse"] >= 0.91
    assert found["lift"] >= 0.71


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


def test_most_float_products_are_understood_and_half_of_them_widen():
    if not (Path(os.environ.get("DOVETAIL_CORPUS", "../shared")) / "kernels").is_dir():
        pytest.skip("the corpus of kernels is not here")
    from benchmarks.lift import Row, kernel_files, lift_row, read_file, setting_of

    rows, kernels = [], []
    for path in kernel_files():
        if "f32-gemm" in path.name:
            (function,) = (pieces := read_file(path, setting_of(path))).own
            rows.append(Row(path.name, function))
            kernels.append(lift_row(pieces, rows[-1]).unit.function(function))
    assert sum(row.way == "by meaning" for row in rows) >= 8
    assert sum("LANES" in {t.name for t in kernel.tunables} for kernel in kernels) >= 5
