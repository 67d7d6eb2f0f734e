"""Files of Python that make workflows: what is wrong with one is told by its name."""

from __future__ import annotations

import pytest

from dovetail.ir.errors import WorkflowError
from dovetail.runtime.flows.stored_workflows import run_file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys\nsys.exit(0)\n", r"SystemExit: 0"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import nothing_of_that_name\n", "ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused(text: str, said: str) -> None:
    with pytest.raises(WorkflowError, match=rf"flow\.py cannot be run \({said}"):
        run_file(text.encode(), "flow.py")
