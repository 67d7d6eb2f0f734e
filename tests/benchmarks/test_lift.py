"""The third-party kernels of the corpus parse and lift as far as was reached; long."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


def test_most_functions_of_the_corpus_parse_and_lift():
    if not (Path(os.environ.get("DOVETAIL_CORPUS", "../shared")) / "kernels").is_dir():
        pytest.skip("the corpus of kernels is not here")
    from benchmarks.lift import kernel_files, measure, summary

    rows = [row for path in kernel_files() for row in measure(path, builds=False)]
    found = summary(rows)
    assert found["functions"] >= 350
    assert found["parse"] >= 0.91
    assert found["lift"] >= 0.71
