"""Recordings of gradients: a bounded number of steps, in files of NumPy's npz format."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec, check_unique
from gradcomp.version import __version__

Positions = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
FORMAT = 1
_KIND = "gradcomp gradients"
_MOST_ABOUT_BYTES = 1 << 26
_MOST_HEADER_BYTES = 1 << 12
#: The arrays of the file, with their dtype and number of dimensions.
_ARRAYS = {
    "about": ("|u1", 1),
    "counts": ("<i8", 1),
    "positions": ("<i8", 1),
    "steps": ("<i8", 1),
    "values": ("<f4", 3),
}
#: Exceptions that reading a file which is not a recording may raise.
_UNREADABLE = (
    ValueError,
    KeyError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
    RuntimeError,
    struct.error,
)


class Kept:
    """Steps that are multiples of ``every``, with the values of all ranks: at most ``most`` of them.

    Before there would be one more, ``every`` doubles and steps that are not multiples of it are dropped. The kept steps
    depend on step numbers only, so all ranks keep the same ones, with values or without.
    """

    def __init__(
        self, every: int, most: int, steps: list[int] | None = None, rows: list[Floats] | None = None
    ) -> None:
        self.every = every
        self.steps: list[int] = []
        self.rows: list[Floats] = []
        self.most = most
        for place, step in enumerate(steps or []):
            self.add(step, rows[place] if rows else None)

    def due(self, step: int) -> bool:
        """Returns true if the step is to be recorded."""
        return step % self.every == 0

    def add(self, step: int, row: Floats | None) -> None:
        """Appends a due step; ``row`` is None on ranks that keep no values."""
        while len(self.steps) >= self.most:
            self._thin()
        if not self.due(step):
            return
        self.steps.append(step)
        if row is not None:
            self.rows.append(row)

    def _thin(self) -> None:
        self.every *= 2
        stay = [place for place, step in enumerate(self.steps) if self.due(step)]
        self.steps = [self.steps[place] for place in stay]
        self.rows = [self.rows[place] for place in stay if place < len(self.rows)]


@dataclass(frozen=True)
class Sampling:
    """The elements of the layers that a recording holds, the same on all ranks.

    ``positions``: by layer, ascending indices of the elements in memory order.
    """

    layers: tuple[LayerSpec, ...]
    positions: tuple[Positions, ...]
    seed: int

    @cached_property
    def ends(self) -> list[int]:
        """Returns where each layer's values end in a rank's row."""
        return list(accumulate(len(each) for each in self.positions))

    @property
    def width(self) -> int:
        """Returns the number of values of one rank in one step."""
        return self.ends[-1] if self.ends else 0

    def part(self, layer: int) -> slice:
        """Returns the slice of a rank's row that holds a layer's values."""
        return slice(self.ends[layer] - len(self.positions[layer]), self.ends[layer])

    def same_as(self, other: Sampling) -> bool:
        """Returns true if both hold the same elements of the same layers."""
        return self.layers == other.layers and all(
            np.array_equal(mine, theirs) for mine, theirs in zip(self.positions, other.positions, strict=True)
        )


def sample(layers: Sequence[LayerSpec], elements: int, seed: int) -> Sampling:
    """Draws at most ``elements`` positions in each layer without replacement, seeded by ``seed`` and its name."""
    positions = tuple(_positions(layer, elements, seed) for layer in layers)
    return Sampling(tuple(layers), positions, seed)


def _positions(layer: LayerSpec, elements: int, seed: int) -> Positions:
    if layer.size <= elements:
        return np.arange(layer.size, dtype=np.int64)
    random = np.random.default_rng([seed, layer.hash])
    return np.sort(random.choice(layer.size, elements, replace=False, shuffle=False)).astype(np.int64)


@dataclass(frozen=True)
class Recording:
    """The gradients of all ranks, in some elements and some steps.

    ``values``: float32 of shape (steps, ranks, ``sampling.width``); NaN if a rank had no gradient. ``steps``: ascending
    numbers of the exchanges, multiples of ``every``.
    """

    sampling: Sampling
    steps: npt.NDArray[np.int64]
    values: Floats
    every: int
    version: str = __version__

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.sampling.layers

    @property
    def ranks(self) -> int:
        """Returns the number of recorded ranks."""
        return int(self.values.shape[1])

    def of(self, layer: int, rank: int) -> Floats:
        """Returns a layer's values on one rank, of shape (steps, elements)."""
        return self.values[:, rank, self.sampling.part(layer)]

    def matching(self, patterns: Sequence[str]) -> list[int]:
        """Returns the numbers of the layers whose names match a shell pattern; ConfigError if there are none."""
        return matching([layer.name for layer in self.layers], patterns)


def matching(names: Sequence[str], patterns: Sequence[str]) -> list[int]:
    """Returns the numbers of the names that match one of the shell patterns; ConfigError for a pattern without any."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(repr(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")
            raise ConfigError(f"no layer matches {pattern!r}; there are {shown}")
    return [i for i, name in enumerate(names) if any(fnmatchcase(name, pattern) for pattern in patterns)]


# ------------------------------------------------------------------------------------------ writing


def write(
    path: str | os.PathLike[str],
    sampling: Sampling,
    every: int,
    ranks: int,
    steps: Sequence[int],
    rows: Sequence[Floats],
) -> None:
    """Writes a recording in one rename, so that the path always holds a whole file. Raises OSError.

    ``rows``: for each step the values of all ranks, (ranks, width). Before the rename the new file is
    ``.NAME.partial``.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    about = {
        "kind": _KIND,
        "format": FORMAT,
        "version": __version__,
        "every": every,
        "seed": sampling.seed,
        "layers": [[layer.name, list(layer.shape), layer.dtype] for layer in sampling.layers],
    }
    small: dict[str, npt.NDArray[Any]] = {
        "about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
        "counts": np.array([len(each) for each in sampling.positions], dtype=np.int64),
        "positions": np.concatenate([*sampling.positions, np.empty(0, dtype=np.int64)]),
        "steps": np.array(steps, dtype=np.int64),
    }
    try:
        with partial.open("wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name, array in small.items():
                    with archive.open(f"{name}.npy", "w") as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
                with archive.open("values.npy", "w", force_zip64=True) as member:
                    shape = (len(rows), ranks, sampling.width)
                    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(member, header)
                    for row in rows:  # one step at a time, to avoid a second copy of all values
                        member.write(np.ascontiguousarray(row, dtype="<f4").tobytes())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


# ------------------------------------------------------------------------------------------ reading


def read(path: str | os.PathLike[str]) -> Recording:
    """Reads a recording. Nothing in the file is run or inflated: arrays of objects and compressed arrays are refused.

    Raises ConfigError for a file that cannot be read, is not a recording, ends early, or contradicts itself.
    """
    try:
        with Path(path).open("rb") as file, zipfile.ZipFile(file) as archive:
            size = os.fstat(file.fileno()).st_size
            arrays = {name: _array(archive, name, size) for name in _ARRAYS}
        return _recording(arrays)
    except OSError as error:
        raise ConfigError(f"cannot read the recording {path}: {error.strerror or error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path} is not a recording of gradients: {error}") from error
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{path} is not a recording of gradients: {reason}") from error


def _array(archive: zipfile.ZipFile, name: str, most_bytes: int) -> npt.NDArray[Any]:
    """Reads an array whose bytes are all in the file, so that no more memory is allocated than the file is long."""
    dtype, dimensions = _ARRAYS[name]
    try:
        entry = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise ValueError(f"it has no array {name!r}") from None
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > most_bytes:
        raise ValueError(f"array {name!r} is compressed, or larger than the file")
    content = archive.read(entry)
    if len(content) != entry.file_size:
        raise ValueError(f"array {name!r} ends early")
    stream = io.BytesIO(content)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError(f"array {name!r} has another version of the format")
    shape, fortran, found = np.lib.format.read_array_header_1_0(stream, max_header_size=_MOST_HEADER_BYTES)
    if found != np.dtype(dtype) or len(shape) != dimensions or fortran:
        raise ValueError(f"array {name!r} must be {dtype} with {dimensions} dimensions")
    begin = stream.tell()
    elements = 1
    for length in shape:
        elements *= length  # Python integers do not overflow
    if min(shape) < 0 or elements * found.itemsize != len(content) - begin:
        raise ValueError(f"array {name!r} does not have the bytes of its shape {list(shape)}")
    return np.frombuffer(content, dtype=found, offset=begin).reshape(shape)


def _recording(arrays: dict[str, npt.NDArray[Any]]) -> Recording:
    about, counts, steps, values = (arrays[name] for name in ("about", "counts", "steps", "values"))
    if about.nbytes > _MOST_ABOUT_BYTES:
        raise ValueError(f"its description has {about.nbytes} bytes, more than {_MOST_ABOUT_BYTES}")
    try:
        described = json.loads(about.tobytes().decode())
    except (ValueError, RecursionError) as error:
        raise ValueError("its description is not JSON") from error
    if not isinstance(described, dict) or described.get("kind") != _KIND:
        raise ValueError(f"its description is not that of {_KIND}")
    if described.get("format") != FORMAT:
        raise ValueError(
            f"format {shortened(described.get('format'))}; this version of gradcomp reads format {FORMAT}"
        )
    every, seed, version, rows = (described.get(key) for key in ("every", "seed", "version", "layers"))
    if type(every) is not int or every < 1 or type(seed) is not int or not isinstance(version, str):
        raise ValueError("its description lacks every, seed or version")
    if not isinstance(rows, list):
        raise ValueError("its description lacks the layers")
    layers = tuple(_layer(row) for row in rows)
    check_unique(layers)
    positions = _parts(counts, arrays["positions"], layers)
    if len(steps) != values.shape[0] or (steps < 0).any() or (np.diff(steps) <= 0).any():
        raise ValueError(f"steps do not ascend, or are not as many as the {values.shape[0]} rows of values")
    sampling = Sampling(layers, positions, seed)
    if sampling.width != values.shape[2]:
        raise ValueError(f"a rank has {values.shape[2]} values for {sampling.width} positions")
    return Recording(sampling, steps, values, every, version)


def _layer(row: Any) -> LayerSpec:
    match row:
        case [str(name), list(shape), str(dtype)] if all(type(n) is int and 0 <= n < 2**40 for n in shape):
            return LayerSpec(name, tuple(shape), dtype)
    raise ValueError(f"a layer must be [name, [shape], dtype], got {shortened(row)}")


def _parts(
    counts: npt.NDArray[np.int64], positions: Positions, layers: Sequence[LayerSpec]
) -> tuple[Positions, ...]:
    if len(counts) != len(layers) or (counts < 0).any() or (counts > len(positions)).any():
        raise ValueError(f"the {len(counts)} counts of positions do not fit {len(layers)} layers")
    if sum(counts.tolist()) != len(positions):
        raise ValueError(f"counts do not add up to the {len(positions)} positions")
    parts = np.split(positions, np.cumsum(counts)[:-1]) if len(counts) else []
    for layer, part in zip(layers, parts, strict=True):
        if len(part) and (part[0] < 0 or part[-1] >= layer.size or (np.diff(part) <= 0).any()):
            raise ValueError(f"positions of layer {layer.name!r} do not ascend within it")
    return tuple(parts)
