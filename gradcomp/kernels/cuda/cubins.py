"""Builds the code of all modules for common devices into the package, without a GPU: ``make cubins``.

``python -m gradcomp.kernels.cuda.cubins`` needs NVRTC alone (``pip install gradcomp[cubins]``).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from gradcomp.kernels.cuda.modules import PACKAGED, Module, compiled, modules, whole, write
from gradcomp.kernels.cuda.nvrtc import installed

ARCHITECTURES: Final = (80, 90, 100)
"""Compute capabilities of A100, H100 and B200. Code of one also runs on newer devices of its major version."""


def build(folder: Path, architectures: Sequence[int], listed: Sequence[Module], jobs: int) -> None:
    """Compiles the modules of ``listed`` that the compiler's folder lacks, and removes all other files from it."""
    compiler = installed()
    folder = folder / f"{compiler.version[0]}.{compiler.version[1]}"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {
        folder / f"{module.digest(f'sm_{each}', compiler.version)}.cubin": (module, f"sm_{each}")
        for each in architectures
        for module in listed
    }
    for file in set(folder.iterdir()) - wanted.keys():
        file.unlink()
    missing = [file for file in wanted if not (file.exists() and whole(file.read_bytes()))]
    with ThreadPoolExecutor(jobs) as pool:
        for line in pool.map(lambda file: _made(file, *wanted[file]), missing):
            sys.stdout.write(line)
    total = sum(file.stat().st_size for file in wanted)
    sys.stdout.write(
        f"{len(missing)} of {len(wanted)} files built in {folder}, {total / 1e6:.1f} MB in all\n"
    )


def _made(file: Path, module: Module, architecture: str) -> str:
    begin = time.thread_time()
    write(file, compiled(module, architecture))
    return f"{time.thread_time() - begin:5.1f} CPU s  {architecture}  {module}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--architectures",
        type=int,
        nargs="+",
        default=ARCHITECTURES,
        metavar="N",
        help="compute capabilities: 90 for 9.0 (default: 80 90 100)",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    given = parser.parse_args()
    build(PACKAGED, given.architectures, modules(), given.jobs)


if __name__ == "__main__":
    main()
