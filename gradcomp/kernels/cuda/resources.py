"""Reads the resources of kernels from their code, without a GPU: registers, memory of a thread, shared memory.

``python -m gradcomp.kernels.cuda.resources encode.cu --architecture 90`` prints a line for each kernel of the modules
whose names contain the word; it needs NVRTC alone.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gradcomp.kernels.cuda.modules import compiled, modules

# Kinds of attributes in sections named .nv.info, and the form of attributes that state their size.
_FRAME_SIZE, _REGISTERS, _SIZED = 0x11, 0x2F, 0x04
_SYMBOLS: Final = 2  # the type of a section that holds the table of symbols


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel: ``local_bytes`` of a thread, with spilled registers; ``shared_bytes`` of a block."""

    registers: int
    local_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    content: bytes
    size: int


def resources(cubin: bytes) -> dict[str, Resources]:
    """Returns the resources of all kernels in an ELF file of NVRTC's, by name."""
    sections = list(_sections(cubin))
    symbols = next(each.content for each in sections if each.kind == _SYMBOLS)
    names = next(each.content for each in sections if each.name == ".strtab")
    shared = {each.name.removeprefix(".nv.shared."): each.size for each in sections}
    found: dict[int, dict[str, int]] = {}
    for section in sections:
        if section.name == ".nv.info":
            for symbol, number in _attributes(section.content, _REGISTERS):
                found.setdefault(symbol, {})["registers"] = number
            for symbol, number in _attributes(section.content, _FRAME_SIZE):
                found.setdefault(symbol, {})["local_bytes"] = number
    kernels = {}
    for symbol, numbers in found.items():
        if "registers" in numbers:
            # Else it is a subroutine, for example a division, which counts with its kernel.
            name = _text(names, struct.unpack_from("<I", symbols, 24 * symbol)[0])
            kernels[name] = Resources(
                numbers["registers"], numbers.get("local_bytes", 0), shared.get(name, 0)
            )
    return kernels


def _sections(cubin: bytes) -> Iterator[_Section]:
    begin = struct.unpack_from("<Q", cubin, 40)[0]
    size, count, names_at = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, begin + size * i) for i in range(count)]
    names = cubin[headers[names_at][4] : headers[names_at][4] + headers[names_at][5]]
    for name, kind, _, _, at, nbytes in headers:
        yield _Section(_text(names, name), kind, cubin[at : at + nbytes], nbytes)


def _attributes(content: bytes, wanted: int) -> Iterator[tuple[int, int]]:
    """Yields symbol and number of every attribute of a kind."""
    at = 0
    while at < len(content):
        form, kind, value = struct.unpack_from("<BBH", content, at)
        at += 4
        if form == _SIZED:
            if kind == wanted:
                symbol, number = struct.unpack_from("<II", content, at)
                yield symbol, number
            at += value


def _text(names: bytes, at: int) -> str:
    return names[at : names.index(b"\0", at)].decode()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("word", help="part of the modules' names, as encode.cu or REDUCE")
    parser.add_argument("--architecture", type=int, default=90, help="compute capability: 90 for 9.0")
    given = parser.parse_args()
    for module in modules():
        if given.word in str(module):
            for name, found in resources(compiled(module, f"sm_{given.architecture}")).items():
                sys.stdout.write(
                    f"{module!s:60} {name:24} {found.registers:4} registers, {found.local_bytes:5} local, "
                    f"{found.shared_bytes:6} shared bytes\n"
                )


if __name__ == "__main__":
    main()
