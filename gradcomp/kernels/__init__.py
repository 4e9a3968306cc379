"""One function per kernel; `reference` defines them, the compiled body is used where it was built.

The functions take a segment table (see `segments`) and serve a whole group per call; `reference` documents
each.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Literal, Protocol, TypeAlias, cast

from gradcomp.kernels import reference
from gradcomp.kernels.segments import (
    BF16,
    BFLOAT16,
    DTYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FP16,
    FP32,
    FP64,
    L2,
    LINF,
    MAX_ELEMENTS,
    MINMAX,
    OWNER_RANK,
    QUANTISERS,
    SEGMENT,
    Bytes,
    SegmentTable,
    wire_bytes,
    wire_bytes_table,
)

__all__ = [
    "BF16",
    "BFLOAT16",
    "DTYPES",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "FP16",
    "FP32",
    "FP64",
    "L2",
    "LINF",
    "MAX_ELEMENTS",
    "MINMAX",
    "OWNER_RANK",
    "QUANTISERS",
    "SEGMENT",
    "Bytes",
    "SegmentTable",
    "body",
    "decode",
    "decode_add",
    "encode",
    "nonzero",
    "reduce",
    "use",
    "wire_bytes",
    "wire_bytes_table",
]

BodyName: TypeAlias = Literal["reference", "native"]


class _Body(Protocol):
    def encode(
        self,
        codec: int,
        table: SegmentTable,
        payload: Bytes,
        flags: Bytes,
        *,
        stochastic: bool,
        seed: int,
        step: int,
        rank: int,
        scale: float,
        decay: float,
    ) -> None: ...

    def decode(
        self, codec: int, table: SegmentTable, payload: Bytes, flags: Bytes, *, divisor: float, scale: float
    ) -> None: ...

    def decode_add(self, codec: int, table: SegmentTable, payload: Bytes, *, scale: float) -> None: ...

    def reduce(
        self,
        codec: int,
        table: SegmentTable,
        payloads: Sequence[Bytes],
        out: Bytes,
        flags: Bytes,
        *,
        stochastic: bool,
        seed: int,
        step: int,
        divisor: float,
        decay: float,
    ) -> None: ...

    def nonzero(self, table: SegmentTable, out: Bytes) -> None: ...


def _installed_bodies() -> dict[str, _Body]:
    bodies: dict[str, ModuleType] = {"reference": reference}
    # Absent is a choice of the build; present but broken must not pass for absent.
    if importlib.util.find_spec("gradcomp._native") is not None:
        from gradcomp.kernels import native

        bodies["native"] = native
    return cast("dict[str, _Body]", bodies)


_bodies = _installed_bodies()
_active: BodyName = "native" if "native" in _bodies else "reference"


def body() -> BodyName:
    """Name of the body in use."""
    return _active


class use:  # noqa: N801  (reads as the statement it is: `use("reference")`, `with use("reference"):`)
    """Select the body of all kernels, until further notice or for a `with` block.

    Raises:
        ValueError: the body is not installed.
    """

    def __init__(self, name: BodyName) -> None:
        global _active
        if name not in _bodies:
            raise ValueError(f"kernel body {name!r} is not installed; available: {', '.join(_bodies)}")
        self._previous = _active
        _active = name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        _active = self._previous


def encode(
    codec: int,
    table: SegmentTable,
    payload: Bytes,
    flags: Bytes,
    *,
    stochastic: bool,
    seed: int,
    step: int,
    rank: int,
    scale: float,
    decay: float,
) -> None:
    """Encode contributions; see `reference.encode`."""
    _bodies[_active].encode(
        codec,
        table,
        payload,
        flags,
        stochastic=stochastic,
        seed=seed,
        step=step,
        rank=rank,
        scale=scale,
        decay=decay,
    )


def decode(
    codec: int, table: SegmentTable, payload: Bytes, flags: Bytes, *, divisor: float, scale: float
) -> None:
    """Decode into the outputs; see `reference.decode`."""
    _bodies[_active].decode(codec, table, payload, flags, divisor=divisor, scale=scale)


def decode_add(codec: int, table: SegmentTable, payload: Bytes, *, scale: float) -> None:
    """Decode and add to the outputs; see `reference.decode_add`."""
    _bodies[_active].decode_add(codec, table, payload, scale=scale)


def reduce(
    codec: int,
    table: SegmentTable,
    payloads: Sequence[Bytes],
    out: Bytes,
    flags: Bytes,
    *,
    stochastic: bool,
    seed: int,
    step: int,
    divisor: float,
    decay: float,
) -> None:
    """Encode the mean of payloads; see `reference.reduce`."""
    _bodies[_active].reduce(
        codec,
        table,
        payloads,
        out,
        flags,
        stochastic=stochastic,
        seed=seed,
        step=step,
        divisor=divisor,
        decay=decay,
    )


def nonzero(table: SegmentTable, out: Bytes) -> None:
    """Which gradients have a nonzero element; see `reference.nonzero`."""
    _bodies[_active].nonzero(table, out)
