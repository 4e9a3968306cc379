"""Every module of CUDA kernels: built or found, loaded, and what its kernels take of a GPU.

    python benchmarks/gpu_modules.py [--processes 8] [--json PATH]

Modules are built side by side, in processes that touch no GPU; then each one is loaded. Columns: registers of a
thread, bytes of its local memory (spilled registers among them), bytes of shared memory of a block.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import report

from gradcomp.kernels.cuda.modules import Module, modules


def build(module: Module, capability: int, cuda: int) -> tuple[str, float]:
    """The file of a module, or its compiler's words behind "!"; and the seconds that took."""
    from gradcomp.kernels.cuda.modules import built

    began = time.perf_counter()
    try:
        found = str(built(module, capability, cuda))
    except Exception as error:  # noqa: BLE001 - the other modules are still to be tried
        found = f"!{type(error).__name__}: {error}"
    return found, time.perf_counter() - began


def load(path: str, kernels: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """What each kernel of a file takes, once the device has it."""
    import cupy

    module = cupy.RawModule(path=path)
    found = {}
    for name in kernels:
        kernel = module.get_function(name)
        found[name] = {
            "registers": int(kernel.num_regs),
            "local_bytes": int(kernel.local_size_bytes),
            "shared_bytes": int(kernel.shared_size_bytes),
        }
    return found


def measured(processes: int) -> list[dict[str, Any]]:
    """A row for each module."""
    import cupy

    capability = int(cupy.cuda.Device(0).compute_capability)
    cuda = int(cupy.cuda.runtime.driverGetVersion())
    listed = modules()
    rows = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        results = pool.map(build, listed, [capability] * len(listed), [cuda] * len(listed))
        for module, (found, seconds) in zip(listed, results, strict=True):
            row: dict[str, Any] = {"module": str(module), "build_seconds": round(seconds, 2)}
            if found.startswith("!"):
                row["error"] = found[1:]
            else:
                row |= {"bytes": Path(found).stat().st_size}
                try:
                    row["kernels"] = load(found, module.kernels)
                except Exception as error:  # noqa: BLE001 - as above
                    row["error"] = f"it does not load: {type(error).__name__}: {error}"
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
