"""Every module of CUDA kernels: built or found, loaded, and what its kernels take of a GPU.

    python benchmarks/gpu_modules.py [--processes 8] [--json PATH]

Modules are built side by side, in processes that touch no GPU; then each one is loaded. Columns: registers of a
thread, bytes of its local memory (spilled registers among them), bytes of shared memory of a block.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import report

from gradcomp.kernels.cuda import source
from gradcomp.kernels.cuda.call import THREADS
from gradcomp.kernels.cuda.codec import CLASSES

Module = tuple[str, Mapping[str, object]]

#: Names of kernels: of sections in a cubin, of entries in PTX.
_KERNELS = re.compile(rb"(?:\x00\.text\.|\.entry )(\w+)")


def modules() -> list[Module]:
    """The source and the definitions of each."""
    by_class = [{"GRADCOMP_CLASS": name} for name in CLASSES]
    coded = {"encode.cu": by_class, "decode.cu": by_class, "losses.cu": by_class}
    found: list[Module] = []
    for path in sorted(Path(source.__file__).parent.glob("*.cu")):
        found += [(path.name, defines) for defines in coded.get(path.name, [{}])]
    return found + [("encode.cu", defines | {"GRADCOMP_TEAM": THREADS}) for defines in by_class]


def build(module: Module, capability: int) -> tuple[str, float]:
    """The file of a module, or its compiler's words behind "!"; and the seconds that took."""
    from gradcomp.kernels.cuda.built import built

    began = time.perf_counter()
    try:
        found = str(built(*module, capability))
    except Exception as error:  # noqa: BLE001 - the other modules are still to be tried
        found = f"!{type(error).__name__}: {error}"
    return found, time.perf_counter() - began


def kernels_of(path: Path) -> list[str]:
    """Names of the kernels that a file holds, in a fixed order."""
    return sorted({name.decode() for name in _KERNELS.findall(path.read_bytes())})


def load(path: str) -> dict[str, dict[str, int]]:
    """What each kernel of a file takes, once the device has it."""
    import cupy

    module = cupy.RawModule(path=path)
    found = {}
    for name in kernels_of(Path(path)):
        kernel = module.get_function(name)
        found[name] = {
            "registers": int(kernel.num_regs),
            "local_bytes": int(kernel.local_size_bytes),
            "shared_bytes": int(kernel.shared_size_bytes),
        }
    return found


def title(module: Module) -> str:
    name, defines = module
    return " ".join([name, *(str(value) for value in defines.values())])


def measured(processes: int) -> list[dict[str, Any]]:
    """A row for each module."""
    import cupy

    capability = int(cupy.cuda.Device(0).compute_capability)
    listed = modules()
    rows = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        results = pool.map(build, listed, [capability] * len(listed))
        for module, (found, seconds) in zip(listed, results, strict=True):
            row: dict[str, Any] = {"module": title(module), "build_seconds": round(seconds, 2)}
            if found.startswith("!"):
                row["error"] = found[1:]
            else:
                row |= {"bytes": Path(found).stat().st_size}
                try:
                    row["kernels"] = load(found)
                except Exception as error:  # noqa: BLE001 - as above
                    row["error"] = f"it does not load: {type(error).__name__}: {error}"
                if not row.get("kernels"):
                    row.setdefault("error", "it holds no kernel")
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    headers = ("module", "kernels", "KB", "built in s", "most registers", "most local bytes", "")
    lines = []
    for row in rows:
        kernels = row.get("kernels", {}).values()
        most = [max((each[key] for each in kernels), default=None) for key in ("registers", "local_bytes")]
        size = round(row["bytes"] / 1e3, 1) if "bytes" in row else None
        first = row.get("error", "").partition("\n")[0]
        lines.append((row["module"], len(kernels), size, row["build_seconds"], *most, first))
    print(report.table(headers, lines))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, help="also write it here")
    options = parser.parse_args()
    rows = measured(options.processes)
    show(rows)
    report.write_json(options.json, {"modules": rows})
    broken = [row["module"] for row in rows if "error" in row]
    print(
        f"{len(rows) - len(broken)} of {len(rows)} modules load" + "".join(f"; not {name}" for name in broken)
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
