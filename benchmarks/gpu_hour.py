"""Everything that only a GPU can show, in pieces of at most ten minutes: `make gpu-hour`.

    python benchmarks/gpu_hour.py [--piece 1] [--out DIRECTORY] [--from PATH]

Runs the stages of gpu_hour_stages.py in their order. A stage is a process with a time limit of its own; at the limit
it ends with all its children. What it found is written at once to gpu-hour.json and gpu-hour.md in the directory, and
nothing else is. A stage that fails is recorded with the last lines of its output, and the next one begins.

Another call goes on where that JSON ends, on another machine too: stages that passed, failed or ran out of time are
kept, all others run. `--from` names the JSON to go on from, if it is not in the directory; `--only` runs stages by
name, whatever the JSON says of them. Exit status: 0 if all stages that were asked for passed or were skipped with a
reason, 1 if one did not, 2 without a GPU: then every stage that has not run is "unmeasured".
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gpu_hour_report
import gpu_predictions
import report
from gpu_hour_process import run_limited
from gpu_hour_stages import PIECES, PROBE_SECONDS, STAGES, Stage
from hosts import exit_on_termination

ROOT = Path(__file__).resolve().parent.parent
NAME = "gpu-hour"

#: What a stage ends with. A stage that is "running" was cut off.
PASSED, FAILED, TIMED_OUT, SKIPPED, UNMEASURED, RUNNING = (
    "passed",
    "failed",
    "timed out",
    "skipped",
    "unmeasured",
    "running",
)
DONE = (PASSED, FAILED, TIMED_OUT)

#: Where Nsight Compute installs itself, the newest first.
PROFILERS = sorted(map(str, Path("/opt/nvidia/nsight-compute").glob("*")), reverse=True)

#: A stage's exit status if this machine's software has no such thing; the last line of its output says why.
NOT_HERE = 77

#: Says on the last line of its output what GPU there is, or why there is none.
PROBE = [sys.executable, str(ROOT / "benchmarks" / "gpu_about.py"), "--probe"]


class Record:
    """What all calls so far have found, by stage; every change is written at once, whole or not at all."""

    def __init__(self, directory: Path, stages: Sequence[Stage], earlier: Path | None = None) -> None:
        self._directory, self._stages = directory, stages
        self.found: dict[str, dict[str, Any]] = {}
        source = earlier or directory / f"{NAME}.json"
        if earlier is not None or source.exists():
            self.found = json.loads(source.read_text(encoding="utf-8"))["stages"]

    def is_done(self, name: str) -> bool:
        """Whether a stage came to its own end, or to that of its time."""
        return self.found.get(name, {}).get("status") in DONE

    def note(self, name: str, **facts: Any) -> None:
        """Replace what is known of a stage."""
        self.found[name] = facts
        self._directory.mkdir(parents=True, exist_ok=True)
        known = [stage.name for stage in self._stages]
        ordered = {name: self.found[name] for name in (*known, *self.found) if name in self.found}
        written = {"benchmark": NAME, "stages": ordered}
        self._write(f"{NAME}.json", json.dumps(written, indent=1) + "\n")
        self._write(f"{NAME}.md", gpu_hour_report.markdown(self._stages, ordered))

    def _write(self, name: str, text: str) -> None:
        partial = self._directory / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._directory / name)


def run(
    stages: Sequence[Stage],
    record: Record,
    *,
    problem: str | None,
    about: dict[str, Any],
    again: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Run what is not done; the exit status. ``problem``: why nothing can be measured here."""
    for stage in stages:
        if record.is_done(stage.name) and not again:
            say(f"{stage.name}: {record.found[stage.name]['status']} before")
            continue
        if problem is not None:
            record.note(stage.name, status=UNMEASURED, reason=problem)
            continue
        facts = {"limit_seconds": stage.limit_seconds, **about}
        record.note(stage.name, status=RUNNING, **facts)
        say(f"{stage.name}: at most {stage.limit_seconds} s")
        facts |= run_stage(stage)
        record.note(stage.name, **facts)
        say(f"{stage.name}: {facts['status']} {facts.get('reason', '')}".rstrip())
    if problem is not None:
        say(f"unmeasured: {problem}")
        return 2
    say(report.table(gpu_predictions.HEADERS, gpu_predictions.beside(record.found)))
    return 0 if all(record.found[stage.name]["status"] in (PASSED, SKIPPED) for stage in stages) else 1


def run_stage(stage: Stage) -> dict[str, Any]:
    """One stage to its end; what it found, and how it ended."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin", *PROFILERS])
    if stage.needs and shutil.which(stage.needs, path=places) is None:
        return {"status": SKIPPED, "reason": f"{stage.needs} is not on this machine"}
    with tempfile.TemporaryDirectory(prefix="gpu-hour-") as folder:
        written = Path(folder) / "found.json"
        command = [part.replace("{json}", str(written)) for part in stage.command]
        began = time.time()
        ended = run_limited(command, stage.limit_seconds, environment(stage, places), ROOT)
        facts: dict[str, Any] = {"began": round(began), "seconds": round(time.time() - began, 1)}
        with suppress(OSError, ValueError):
            facts["found"] = json.loads(written.read_text(encoding="utf-8"))
    return facts | verdict(stage, ended.code, ended.lines)


def verdict(stage: Stage, code: int | None, lines: list[str]) -> dict[str, Any]:
    """The status of a stage that has ended, with its reason if it did not pass. ``code``: None at the limit."""
    output = {"output": lines}
    if code is None:
        return {"status": TIMED_OUT, "reason": f"it took more than {stage.limit_seconds} s", **output}
    if code == NOT_HERE and lines:
        return {"status": SKIPPED, "reason": lines[-1], **output}
    if code:
        return {"status": FAILED, "reason": ": ".join([f"exit status {code}", *lines[-1:]]), **output}
    if stage.tests and not any(re.search(r"\b\d+ passed", line) for line in lines):
        reasons = [line for line in lines if line.startswith("SKIPPED")]
        return {"status": SKIPPED, "reason": (reasons or ["no test ran"])[0], **output}
    return {"status": PASSED, **output}


def environment(stage: Stage, path: str) -> dict[str, str]:
    """What a stage's processes find: the package, which may be the source tree, and helpers beside them."""
    found = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", **stage.variables}
    if stage.tests:
        found["PYTHONSAFEPATH"] = "1"
    else:  # a script imports its neighbours
        found.pop("PYTHONSAFEPATH", None)
    if importlib.util.find_spec("gradcomp") is None:
        found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return found


def probe(command: Sequence[str] = PROBE, seconds: float = PROBE_SECONDS) -> tuple[str | None, str]:
    """Why nothing can be measured here, or None; and the GPU's name. In a process of its own, which may hang."""
    places = os.environ.get("PATH", "")
    ended = run_limited(list(command), seconds, environment(Stage("probe", "", 0, 1, ()), places), ROOT)
    if ended.code is None:
        return f"the GPU did not answer within {seconds:.0f} s", ""
    last = ended.lines[-1] if ended.lines else ""
    return (None, last) if ended.code == 0 else (last or f"exit status {ended.code}", "")


def sources() -> str:
    """A digest of what is measured: results of other sources are told apart by it."""
    made_of = hashlib.sha256()
    for folder in ("gradcomp", "native", "benchmarks", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".hpp", ".cpp"):
                made_of.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return made_of.hexdigest()[:12]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--piece", type=int, choices=PIECES, help="only this one (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / NAME, help="where the two files go")
    parser.add_argument("--from", dest="earlier", type=Path, help="the JSON to go on from")
    parser.add_argument("--only", metavar="NAME[,NAME]", help="these stages, whether or not they are done")
    options = parser.parse_args()
    chosen = [stage for stage in STAGES if options.piece in (None, stage.piece)]
    if options.only:
        names = options.only.split(",")
        if unknown := set(names) - {stage.name for stage in STAGES}:
            parser.error(f"--only: there is no stage {', '.join(sorted(unknown))}")
        chosen = [stage for stage in STAGES if stage.name in names]
    if options.earlier is not None and not options.earlier.is_file():
        parser.error(f"--from: there is no file {options.earlier}")
    exit_on_termination()
    record = Record(options.out, STAGES, options.earlier)
    problem, name = probe()
    about = {"gpu": name, "sources": sources()}
    return run(chosen, record, problem=problem, about=about, again=bool(options.only))


if __name__ == "__main__":
    sys.exit(main())
