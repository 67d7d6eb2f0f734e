"""docs/kernel-language.md: its examples verify and lower, and it names every builtin."""

import re
from pathlib import Path

import pytest

from dovetail.codegen.lower import lower
from dovetail.codegen.targets import ALL_TARGETS
from dovetail.ir.diagnostics import Source
from dovetail.ir.high.ops import OPS
from dovetail.ir.high.parse import parse_high
from dovetail.ir.high.verify import verify_high

PAGE = (Path(__file__).parents[3] / "docs" / "kernel-language.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_verify_and_lower(text):
    source = Source("page", text)
    unit = parse_high(source)
    verify_high(unit, source)
    for function in (f for f in unit.functions if f.kind == "kernel"):
        for target in ALL_TARGETS.values():
            lower(unit, function.name, {}, target, name="k")


def test_every_builtin_is_named():
    words = set(re.findall(r"\w+", PAGE))
    assert [name for name in OPS if name not in words] == []
