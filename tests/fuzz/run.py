"""Fuzz payloads and the protocol; every case follows from its number, and can be run alone.

    python tests/fuzz/run.py --payloads 100000 --steps 10000 --seed 1
    python tests/fuzz/run.py --only payload:4711

Cases run in worker processes, one per core: one that crashes names its case, and another goes on behind it.
Exit status 1 if something was found.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

_SHOWN = 5
_WORKER_SECONDS = 7200.0
_MOST_CRASHES = 20


def main() -> int:
    arguments = _arguments()
    if arguments.only:
        kind, _, number = arguments.only.partition(":")
        _, found = _case(kind, int(number))
        print(found or "nothing found")
        return bool(found)
    if arguments.worker:
        _work(arguments)
        return 0
    found = 0
    for kind, wanted in (
        ("payload", arguments.payloads),
        ("protocol", arguments.steps),
        ("sender", arguments.steps),
    ):
        found += _fuzz(kind, wanted, arguments.seed)
    return bool(found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--payloads", type=int, default=100_000, help="how many (default: 100000)")
    parser.add_argument(
        "--steps",
        type=int,
        default=10_000,
        help="of the protocol, altered on the way, and as many altered by the sender (default: 10000)",
    )
    parser.add_argument("--seed", type=int, default=1, help="another seed, other cases (default: 1)")
    parser.add_argument("--only", help="one case, as it was reported")
    parser.add_argument(
        "--worker", nargs=4, metavar=("KIND", "FIRST", "STRIDE", "WANTED"), help=argparse.SUPPRESS
    )
    parser.add_argument("--note", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _case(kind: str, number: int) -> tuple[int, str]:
    if kind == "payload":
        from fuzz import payloads

        return 1, payloads.run(number)
    from fuzz import protocol

    return protocol.run(number, altered_by_sender=kind == "sender")


def _work(arguments: argparse.Namespace) -> None:
    """Cases FIRST, FIRST + STRIDE, ... until WANTED are done; the number of the present one is in the note."""
    kind, first, stride, wanted = arguments.worker[0], *map(int, arguments.worker[1:])
    warnings.simplefilter("ignore")
    done, number = 0, first
    with arguments.note.open("r+b") as file, mmap.mmap(file.fileno(), 16) as note:
        while done < wanted:
            note[:] = struct.pack("<qq", number, done)
            count, found = _case(kind, number)
            done += count
            if found:
                print(json.dumps([number, found]), flush=True)
            number += stride
        note[:] = struct.pack("<qq", number, done)


def _fuzz(kind: str, wanted: int, seed: int) -> int:
    """How many findings there are; they are printed."""
    cores = len(os.sched_getaffinity(0))
    began = time.monotonic()
    findings: list[tuple[int, str]] = []
    with tempfile.TemporaryDirectory(prefix="gradcomp-fuzz-") as directory:
        workers = [
            _Worker(Path(directory) / str(i), kind, seed * 10**9 + i, cores, -(-wanted // cores))
            for i in range(cores)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            while worker.wait():
                worker.start()
        for worker in workers:
            findings += worker.findings
        done = sum(worker.done for worker in workers)
    seconds = time.monotonic() - began
    unit = {
        "payload": "payloads",
        "protocol": "steps of the protocol, altered on the way",
        "sender": "steps of the protocol, altered by the sender",
    }[kind]
    print(f"{done} {unit} in {seconds:.0f} s, {done / seconds:.0f} a second: {len(findings)} findings")
    kinds: Counter[str] = Counter()
    for number, found in sorted(findings):
        name = found.partition(":")[0] if kind != "payload" else found.partition(": ")[2]
        kinds[name] += 1
        if kinds[name] <= _SHOWN:
            print(f"  --only {kind}:{number}  {found}")
    for name, count in kinds.most_common():
        print(f"  {count:7} {name}")
    return len(findings)


class _Worker:
    """A process that runs cases, and starts again behind one that killed it."""

    def __init__(self, path: Path, kind: str, first: int, stride: int, wanted: int) -> None:
        self._path, self._kind, self._next, self._stride, self._wanted = path, kind, first, stride, wanted
        self.done = self._crashes = 0
        self.findings: list[tuple[int, str]] = []

    def start(self) -> None:
        note = self._path.with_suffix(".note")
        note.write_bytes(struct.pack("<qq", self._next, 0))
        numbers = [str(n) for n in (self._next, self._stride, self._wanted - self.done)]
        command = [sys.executable, __file__, "--note", str(note), "--worker", self._kind, *numbers]
        with (
            self._path.with_suffix(".out").open("wb") as out,
            self._path.with_suffix(".err").open("wb") as err,
        ):
            self._process = subprocess.Popen(command, stdout=out, stderr=err)

    def wait(self) -> bool:
        """Until it has ended; True if it crashed and there is more to do."""
        status = self._process.wait(_WORKER_SECONDS)
        number, done = struct.unpack("<qq", self._path.with_suffix(".note").read_bytes())
        self.done += done
        for line in self._path.with_suffix(".out").read_text().splitlines():
            self.findings.append(tuple(json.loads(line)))
        if status == 0:
            return False
        text = self._path.with_suffix(".err").read_text(errors="replace")
        self.findings.append((number, f"crash: status {status}: {text[-2000:]}"))
        self.done, self._next = self.done + 1, number + self._stride
        self._crashes += 1
        return self.done < self._wanted and self._crashes < _MOST_CRASHES


if __name__ == "__main__":
    sys.exit(main())
