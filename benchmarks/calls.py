"""Python per bucket and phase where gradients lie on a GPU, and what the GPU is asked to do; needs no GPU.

    python benchmarks/calls.py [--steps 7] [--json PATH]

Two ranks in one process exchange the gradients of a GPT of 125 M parameters, under one codec and one size of buckets a
row, over a driver that does nothing but count. So the figures are those of the program itself: what its Python takes in
a phase of a bucket, the least of the steps, the median over buckets; in the thread's own time, so that whatever else
runs on the machine does not count for much. A phase is what the trace has between two rounds: "compress" before the
first, "decompress" behind the last, "between" where there are two: the reduction of codes, or PowerSGD's Q from the
sum of P. Messages of fixed size stay on the device, as over NCCL; over a transport on the host their bytes are copied
once more each way. Driver calls are one rank's in one step: "synchronize" blocks the thread, "wait" is an event that it
asks for, "event" is one of the frameworks'. Memory that kernels would fill holds zeros, but selections find as many
elements as are wanted, or, where sizes vary, fewer, and another number each time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report
from null_device import NullTransport, NullWorld, null_device

from gradcomp import Compressor, Config, LayerSpec, Policy, PowerSGD, Quantize, TopK
from gradcomp.core.trace import Span
from gradcomp.exchange import memory
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.settings import Settings
from gradcomp.kernels.devices import Device

RANKS = 2
MEBI = 1 << 20
SIZES = (1, 16, 32)  # Mi elements of a bucket

CODECS: dict[str, Compressor] = {
    "4 bits": Quantize(4),
    "TopK 1%": TopK(0.01),
    "TopK 1%, zeros": TopK(0.01, zeros=True),
    "PowerSGD 4": PowerSGD(4),
    "TopK 1%, sizes vary": TopK(0.01),
}

#: Of these every selection has another size.
VARYING = "TopK 1%, sizes vary"

#: Python of one phase of one bucket that is at most wanted, in microseconds.
BAR = 60.0

PHASES = ("compress", "between", "decompress")
SPANS = ("compress", "reduce", "decompress", "feedback")  # of the trace, that count
CALLS = (
    "launch",
    "upload",
    "download",
    "zero",
    "synchronize",
    "wait",
    "event",
    "follow",
    "allocate",
    "pinned",
)


@dataclass(frozen=True)
class Row:
    """One codec at one size of buckets. ``phases``: microseconds of Python; ``rest``: those of a bucket beside them."""

    codec: str
    mebi: int
    buckets: int
    calls: dict[str, float]
    phases: dict[str, float]
    rest: float

    @property
    def missed(self) -> bool:
        """Whether a phase takes longer than the bar."""
        return any(each > BAR for each in self.phases.values())


def gpt(width: int = 768, blocks: int = 12, words: int = 50_257, places: int = 1024) -> list[LayerSpec]:
    """The layers of a GPT; by default one of 124 M parameters."""

    def linear(name: str, outputs: int, inputs: int) -> Iterator[LayerSpec]:
        yield LayerSpec(f"{name}.weight", (outputs, inputs), "float32", "weight")
        yield LayerSpec(f"{name}.bias", (outputs,), "float32", "bias")

    def norm(name: str) -> Iterator[LayerSpec]:
        for part in ("weight", "bias"):
            yield LayerSpec(f"{name}.{part}", (width,), "float32", "norm")

    found = [
        LayerSpec("words.weight", (words, width), "float32", "embedding"),
        LayerSpec("places.weight", (places, width), "float32", "embedding"),
    ]
    for i in range(blocks):
        found += norm(f"{i}.norm1")
        found += linear(f"{i}.attention", 3 * width, width)
        found += linear(f"{i}.projection", width, width)
        found += norm(f"{i}.norm2")
        found += linear(f"{i}.widen", 4 * width, width)
        found += linear(f"{i}.narrow", width, 4 * width)
    return found + list(norm("norm"))


class _Timed:
    """A pipeline's transport, whose own time does not count."""

    def __init__(self, transport: NullTransport) -> None:
        self.seconds = 0.0
        join = transport._join

        def timed(*arguments: Any) -> Any:
            begin = time.thread_time()
            handle = join(*arguments)
            self.seconds += time.thread_time() - begin
            return handle

        transport._join = timed  # type: ignore[method-assign]


@contextmanager
def thread_time() -> Iterator[None]:
    """Spans in the time that this thread has run."""
    before = memory.perf_counter
    memory.perf_counter = time.thread_time
    try:
        yield
    finally:
        memory.perf_counter = before


def measure(
    layers: Sequence[LayerSpec], name: str, compressor: Compressor, mebi: int, steps: int, device: Device
) -> Row:
    """A row, from all steps but the first two."""
    world = NullWorld(RANKS)
    transports = [NullTransport(world, rank) for rank in range(RANKS)]
    timed = _Timed(transports[0])
    plan = Policy(compressor).plan(layers)
    config = Config(slice_elements=mebi * MEBI, statistics_every_steps=0, reorder=False, trace_spans=1 << 20)
    pipelines = [
        Pipeline(layers, plan, transport, config, lambda layer: 0, Settings(device=device))
        for transport in transports
    ]
    first, driver = pipelines[0], device.driver
    buckets = len(first.layout.buckets)
    spans: dict[str, dict[int, float]] = {phase: {} for phase in PHASES}
    rest = []
    calls: dict[str, float] = {}
    for step in range(steps + 2):
        for pipeline in pipelines:
            pipeline.open()
            for layer in reversed(range(len(layers))):
                pipeline.arrivals.submit(
                    Submission(layer, 256 * (layer + 1), 256 * (layer + 1), None, device.mark(layer))
                )
            pipeline.arrivals.flush()
        before = driver.calls.copy()  # type: ignore[union-attr]
        seconds, timed.seconds = 0.0, 0.0
        while any(pipeline.is_open for pipeline in pipelines):
            for pipeline in pipelines:
                begin = time.thread_time()
                pipeline.poll()
                if pipeline is first:
                    seconds += time.thread_time() - begin
        calls = {kind: (driver.calls - before)[kind] / RANKS for kind in CALLS}  # type: ignore[union-attr]
        calls["event"] = len(layers)
        if step > 1:
            for bucket, found in between_rounds(first.trace.spans(), first.step - 1).items():
                seconds -= sum(found)
                for phase, each in zip(
                    ("compress", *("between",) * (len(found) - 2), "decompress"), found, strict=True
                ):
                    spans[phase][bucket] = min(each, spans[phase].get(bucket, each))
            rest.append((seconds - timed.seconds) / buckets)
        for pipeline in pipelines:
            pipeline.commit()
    phases = {phase: 1e6 * statistics.median(each.values()) for phase, each in spans.items() if each}
    return Row(name, mebi, buckets, calls, phases, 1e6 * min(rest))


def between_rounds(spans: Sequence[Span], step: int) -> dict[int, list[float]]:
    """What a step's buckets take before their first round, between two of them, and behind the last."""
    found: dict[int, list[float]] = defaultdict(lambda: [0.0])
    for span in spans:
        if span.step == step:
            if span.name == "send":
                found[span.bucket].append(0.0)
            elif span.name in SPANS:
                found[span.bucket][-1] += span.end - span.begin
    return found


def rows(layers: Sequence[LayerSpec], steps: int) -> Iterator[Row]:
    """All of them."""
    for name, compressor in CODECS.items():
        for mebi in SIZES:
            with thread_time(), null_device(varying=name == VARYING) as device:
                yield measure(layers, name, compressor, mebi, steps, device)


def show(found: Sequence[Row]) -> str:
    """The table."""
    headers = ["codec", "Mi elements", "buckets", *CALLS, *(f"{phase} us" for phase in PHASES), "rest us"]
    lines = [
        [
            row.codec,
            row.mebi,
            row.buckets,
            *(f"{row.calls[kind]:g}" for kind in CALLS),
            *(f"{row.phases[phase]:.0f}" if phase in row.phases else None for phase in PHASES),
            f"{row.rest:.0f}",
        ]
        for row in found
    ]
    return report.table(headers, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=7, help="steps that count (default: 7)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    about = report.machine()
    found = list(rows(gpt(), options.steps))
    print(report.describe(about))
    print(show(found))
    missed = [f"{row.codec} at {row.mebi} Mi" for row in found if row.missed]
    print(f"bar: at most {BAR:.0f} us a phase: {'missed by ' + ', '.join(missed) if missed else 'met'}")
    report.write_json(options.json, {"machine": about, "bar": BAR, "rows": [asdict(row) for row in found]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
