"""What an accelerator does here: tests, tokens/s, NEO, generated products, clusters, encoders.

Run `make gpu-report` (ten minutes at most, no network). Each section is a process of its own with a
time limit: one that fails leaves the others. Writes `gpu_report.json` and `gpu_report.md` into
--output. `--device torch:cpu --tiny` tries the script out on small shapes without an accelerator.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from common import Report, machine_facts, show
from gpu_sections import LEFT_OUT, SECTIONS, Setting

HERE = Path(__file__).parent
TAIL = 2000
"""Characters of a failed section's output that the report keeps."""
NO_DEVICE = (
    "torch sees no accelerator here; install torch for the one there is, or try the script out "
    "with --device torch:cpu --tiny"
)


@dataclass(frozen=True, slots=True)
class Done:
    """What a section came to. state: ok, left out, failed, or late."""

    name: str
    state: str
    seconds: float
    about: str
    rows: tuple[dict[str, Any], ...] = ()


def run_section(name: str, setting: Setting, work: Path) -> Done:
    """Run a section in a process; it and its children are ended when its time is over."""
    limit, about = SECTIONS[name].seconds, SECTIONS[name].about
    out, log = work / f"{name}.json", work / f"{name}.log"
    command = [sys.executable, HERE / "gpu_sections.py", name, *setting.options(), "--out", out]
    begun = time.monotonic()
    with log.open("wb") as file:
        child = subprocess.Popen(
            [*map(str, command), "--work", str(work)],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=HERE.parent,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(child)
    seconds = time.monotonic() - begun
    rows = tuple(msgspec.json.decode(out.read_bytes())) if out.exists() else ()
    said = log.read_text(errors="replace")[-TAIL:].strip()
    if code == LEFT_OUT:
        return Done(name, "left out", seconds, said.splitlines()[-1] if said else about)
    if code is None:
        return Done(name, "late", seconds, f"not done in {limit} s\n{said}", rows)
    return Done(name, "failed" if code else "ok", seconds, said if code else about, rows)


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End what a section has left running, itself included."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def page(device: str, facts: dict[str, Any], sections: Sequence[Done]) -> str:
    """Return the report as Markdown."""
    known = {name: facts[name] for name in ("cpu", "cores", "system", "python")}
    known |= {name: facts["packages"].get(name, "none") for name in ("dovetail", "torch")}
    head = ", ".join(f"{name} {show(value)}" for name, value in known.items())
    lines = [f"# Report of {device}", "", head, ""]
    for done in sections:
        lines += [f"## {done.name}: {done.state} ({done.seconds:.0f} s)", ""]
        lines += [done.about, ""] if done.state in ("ok", "left out") else fenced(done.about)
        lines += table(done.rows)
    return "\n".join(lines).rstrip() + "\n"


def fenced(text: str) -> list[str]:
    """Return the lines of a program's output."""
    return ["```", *text.splitlines(), "```", ""]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return flat objects as a table of Markdown."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not columns:
        return []
    cells = [columns, ["---"] * len(columns)]
    cells += [[show(row.get(name, "")) for name in columns] for row in rows]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]


def find_device(asked: str | None) -> str:
    """Return the device that is asked for, else torch's accelerator; exit where there is none."""
    if asked is not None:
        return asked
    try:
        import torch
    except ImportError:
        print("torch is not installed; pip install 'dovetail[gpu]'", file=sys.stderr)
        raise SystemExit(2) from None
    if not torch.accelerator.is_available():
        print(NO_DEVICE, file=sys.stderr)
        raise SystemExit(2)
    return str(torch.accelerator.current_accelerator().type)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections; return 1 where one of them failed or was late."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cuda, cuda:1, xpu, npu or torch:cpu; default: torch's")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script out")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="names, by comma")
    options = parser.parse_args(argv)
    names = options.sections.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"there is no section {unknown[0]!r}; there are: {', '.join(SECTIONS)}")
    setting = Setting(find_device(options.device), options.tiny)
    options.output.mkdir(parents=True, exist_ok=True)
    found = []
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as work:
        for name in names:
            found.append(run_section(name, setting, Path(work)))
            print(f"{name:12} {found[-1].state:9} {found[-1].seconds:6.1f} s", flush=True)
    report = Report("gpu_report", {"device": setting.device, "tiny": setting.tiny})
    report.rows = [{"section": done.name, **row} for done in found for row in done.rows]
    for done in found:
        figures = {"state": done.state, "seconds": round(done.seconds, 1)}
        report.summary[done.name] = figures | ({} if done.state == "ok" else {"said": done.about})
    report.write(options.output / "gpu_report.json")
    text = page(setting.device, machine_facts(), found)
    (options.output / "gpu_report.md").write_text(text, encoding="utf-8")
    return int(any(done.state in ("failed", "late") for done in found))


if __name__ == "__main__":
    sys.exit(main())
