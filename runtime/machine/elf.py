"""A kernel library as data: its table of symbols is read, nothing of it is loaded or run.

In: a .so file and its KernelIndex. Out: a `ReadLibrary`, to which tapes bind as to a loaded one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from elftools.common.utils import struct_parse
from elftools.elf.elffile import ELFFile

from dovetail.ir.files import open_regular
from dovetail.runtime.machine import abi
from dovetail.runtime.machine.library import KernelLibrary

MACHINES = {"x86": "EM_X86_64", "aarch64": "EM_AARCH64"}
"""First word of a target's name -> the machine that its libraries are for."""
MOST_SECTIONS = 1 << 12
MOST_NAME = 1 << 10
"""Bytes of a symbol's name; ours have fewer."""
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section (0: it is another library's), ...


class ReadLibrary(KernelLibrary):
    """What libraries export, by their tables: to bind to, not to run."""

    def _load(self, path: Path) -> Mapping[str, int]:
        """Return the address of each symbol of a file; ArtifactError as where it is loaded."""
        try:
            with open_regular(path) as file:
                symbols = read_symbols(file, MACHINES.get(self.index.target.partition("-")[0]))
        except OSError as error:
            raise self._error(f"cannot be loaded ({error.strerror})", path) from None
        except Exception as error:  # of a reader of files that may hold anything
            raise self._error(f"cannot be loaded ({error or type(error).__name__})", path) from None
        if missing := next((name for name in abi.PROTOTYPES if name not in symbols), None):
            raise self._error(f"cannot be loaded (it lacks {missing})", path)
        return symbols

    def _address(self, kernel: str) -> int:
        found: int | None = self._loaded[self._homes.get(kernel, self.path)].get(
            f"dt_entry_{kernel}"
        )
        if found is None:
            raise self._error(f"lacks the kernel {kernel!r}")
        return found


def read_symbols(file: BinaryIO, machine: str | None) -> dict[str, int]:
    """Return what a shared library exports: addresses by name, in time that its size bounds.

    machine: that it must be for, None = any. Raises ValueError, or what reading raises, where it is
    no such library.
    """
    elf = ELFFile(file)
    kind = elf["e_type"], elf.elfclass, elf.little_endian
    if kind != ("ET_DYN", 64, True) or machine not in (None, elf["e_machine"]):
        raise ValueError(f"it is no shared library for {machine or 'this machine'}")
    if elf["e_shnum"] > MOST_SECTIONS:
        raise ValueError(f"it has more than {MOST_SECTIONS} sections")
    places = (elf["e_shoff"] + n * elf["e_shentsize"] for n in range(elf["e_shnum"]))
    headers = [struct_parse(elf.structs.Elf_Shdr, file, place) for place in places]
    table = next((header for header in headers if header["sh_type"] == "SHT_DYNSYM"), None)
    if table is None or not table["sh_link"] < len(headers):
        raise ValueError("it has no table of symbols")
    names = _contents(file, headers[table["sh_link"]])
    symbols = _contents(file, table)
    found: dict[str, int] = {}
    for name, _, _, section, value, _ in _SYMBOL.iter_unpack(symbols):
        end = names.find(b"\0", name, name + MOST_NAME)
        if section and end >= 0:
            found[names[name:end].decode("ascii", "replace")] = value
    return found


def _contents(file: BinaryIO, header: Any) -> bytes:
    """Return the bytes of a section, which must lie in the file."""
    start, size = header["sh_offset"], header["sh_size"]
    if start + size > os.fstat(file.fileno()).st_size:
        raise ValueError("a section of it lies outside the file")
    file.seek(start)
    return file.read(size)
