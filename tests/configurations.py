"""Every compressor configuration that the contract suite and the golden payloads run through: a newcomer adds a row."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp import Cast, Compressor, Identity, Quantize


@dataclass(frozen=True)
class Row:
    """What the suite may expect of a compressor.

    ``error``: bound on the error of a first step, in units of the largest gradient (where nothing stronger holds).
    ``unbiased``: the expected mean is the true one. ``constants``: equal values come back as they were.
    """

    compressor: Compressor
    error: float | None = None
    unbiased: bool = False
    constants: bool = True

    @property
    def telescopes(self) -> bool:
        return self.compressor.keeps_residual and self.compressor.residual_decay == 1.0


ROWS = {
    "none": Row(Identity(), error=1e-6),
    "fp32": Row(Cast("float32"), error=1e-6),
    "fp16": Row(Cast("float16"), error=2**-10),
    "bf16": Row(Cast("bfloat16"), error=2**-7),
    "fp16-feedback": Row(Cast("float16", feedback=True), error=2**-10),
    "bf16-feedback": Row(Cast("bfloat16", feedback=True), error=2**-7),
    "minmax-4": Row(Quantize(4, 64), unbiased=True),
    "minmax-3-odd": Row(Quantize(3, 33), unbiased=True),
    "minmax-1": Row(Quantize(1, 32), unbiased=True),
    "minmax-4-nearest": Row(Quantize(4, 64, rounding="nearest")),
    "minmax-1-nearest-odd": Row(Quantize(1, 33, rounding="nearest")),
    "minmax-5-feedback": Row(Quantize(5, 40, feedback=True)),
    "minmax-3-decay": Row(Quantize(3, 100, rounding="nearest", decay=0.5), error=2 / 7),
    "minmax-2-no-feedback": Row(Quantize(2, 16, rounding="nearest", feedback=False), error=2 / 3),
    "l2-8": Row(Quantize(8, 128, "l2"), unbiased=True, constants=False),
    "l2-1": Row(Quantize(1, 32, "l2"), unbiased=True, constants=False),
    "linf-6-feedback": Row(Quantize(6, 50, "linf", feedback=True)),
    "linf-2-nearest": Row(Quantize(2, 48, "linf", "nearest")),
}
