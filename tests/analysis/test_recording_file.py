"""The file of a recording: what is written is read, and a file that is none is a typed error."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradcomp.contrib.recording import Kept, Recording, read, sample, write
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec

LAYERS = [LayerSpec("a.weight", (10, 10)), LayerSpec("b.weight", (3, 2), "bfloat16"), LayerSpec("none", (0,))]


def made(path: Path, ranks: int = 2, steps: tuple[int, ...] = (0, 5, 15)) -> Recording:
    sampling = sample(LAYERS, 20, seed=3)
    rows = np.random.default_rng(0).standard_normal((len(steps), ranks, sampling.width)).astype(np.float32)
    write(path, sampling, 5, ranks, steps, list(rows))
    return Recording(sampling, np.array(steps), rows, 5)


def test_what_is_written_is_read(tmp_path: Path):
    path = tmp_path / "run.npz"
    recording = made(path)
    found = read(path)
    assert found.sampling.same_as(recording.sampling)
    assert (found.layers, found.every, found.sampling.seed) == (tuple(LAYERS), 5, 3)
    np.testing.assert_array_equal(found.values, recording.values)
    np.testing.assert_array_equal(found.steps, recording.steps)
    assert found.of(1, 1).shape == (3, 6)
    assert [len(part) for part in found.sampling.positions] == [20, 6, 0]
    assert list(tmp_path.iterdir()) == [path]


def test_numpy_reads_it_too(tmp_path: Path):
    recording = made(tmp_path / "run.npz")
    with np.load(tmp_path / "run.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["values"], recording.values)
        assert json.loads(arrays["about"].tobytes())["layers"][0] == ["a.weight", [10, 10], "float32"]


def test_a_recording_without_steps_is_read(tmp_path: Path):
    made(tmp_path / "run.npz", steps=())
    assert read(tmp_path / "run.npz").ranks == 2


def test_positions_follow_from_seed_and_name_and_ascend():
    first, again = sample(LAYERS, 20, seed=3), sample(LAYERS[:1], 20, seed=3)
    np.testing.assert_array_equal(first.positions[0], again.positions[0])
    assert (np.diff(first.positions[0]) > 0).all()
    assert not np.array_equal(first.positions[0], sample(LAYERS, 20, seed=4).positions[0])


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "run.npz"
    recording = made(path)
    with pytest.raises(ValueError, match="could not convert"):
        write(path, recording.sampling, 5, 2, [0], ["no array"])  # type: ignore[list-item]
    assert read(path).steps.tolist() == [0, 5, 15]
    assert list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------------------------------ hostile files


def member(array: Any, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array), **settings)
    return buffer.getvalue()


def replaced(name: str, content: bytes, compression: int = zipfile.ZIP_STORED) -> Callable[[Path], None]:
    """Another member under a name."""

    def change(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            members = {entry.filename: archive.read(entry) for entry in archive.infolist()}
        members[f"{name}.npy"] = content
        with zipfile.ZipFile(path, "w", compression) as archive:
            for entry, data in members.items():
                archive.writestr(entry, data)

    return change


def about(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with np.load(path) as arrays:
            described = json.loads(arrays["about"].tobytes())
        text = json.dumps(described | changes).encode()
        replaced("about", member(np.frombuffer(text, np.uint8)))(path)

    return change


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


class Trap:
    """Unpickling it would be noticed."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle of the file was run",)


def huge_header() -> bytes:
    """An array of 2^60 values whose bytes are not there."""
    buffer = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (2**20, 2**20, 2**20)}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no file": (lambda path: path.unlink(), "cannot read the recording"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "cannot read the recording"),
    "empty": (lambda path: path.write_bytes(b""), "not a zip file"),
    "other bytes": (lambda path: path.write_bytes(b"0123456789" * 100), "not a zip file"),
    "cut": (cut, "not a recording of gradients"),
    "one bit": (damaged, "Bad CRC-32"),
    "another npz": (lambda path: np.savez(path, x=np.zeros(3)), "it has no array 'about'"),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps(Trap())), "not a zip file"),
    "a pickle inside": (
        replaced("values", member(np.array([[[Trap()]]], dtype=object), allow_pickle=True)),
        "must be <f4",
    ),
    "compressed": (
        replaced("values", member(np.zeros((3, 2, 26), "<f4")), zipfile.ZIP_DEFLATED),
        "is compressed",
    ),
    "a header that promises too much": (replaced("values", huge_header()), "bytes of its shape"),
    "a header that is none": (replaced("values", b"\x93NUMPY\x01\x00\x04\x00haha"), "not a recording"),
    "another dtype": (replaced("values", member(np.zeros((3, 2, 26)))), "must be <f4"),
    "too few values": (replaced("values", member(np.zeros((3, 2, 25), "<f4"))), "a rank has 25 values"),
    "too few rows": (replaced("values", member(np.zeros((2, 2, 26), "<f4"))), "2 rows of values"),
    "steps that go back": (replaced("steps", member(np.array([5, 0, 15]))), "do not ascend"),
    "a negative step": (replaced("steps", member(np.array([-5, 0, 15]))), "do not ascend"),
    "a count that is negative": (replaced("counts", member(np.array([-1, 27, 0]))), "counts of positions"),
    "counts that are too large": (replaced("counts", member(np.array([2**62] * 3))), "counts of positions"),
    "a position outside": (
        replaced("positions", member(np.r_[np.arange(19), 100, np.arange(6)])),
        "positions of layer 'a.weight'",
    ),
    "positions twice": (
        replaced("positions", member(np.r_[0, np.arange(19), np.arange(6)])),
        "positions of layer 'a.weight'",
    ),
    "no JSON": (replaced("about", member(np.frombuffer(b"{", np.uint8))), "not JSON"),
    "deep JSON": (replaced("about", member(np.frombuffer(b"[" * 100_000, np.uint8))), "not JSON"),
    "another kind": (about(kind="other"), "not that of gradcomp gradients"),
    "a later format": (about(format=2), "format 2; this version"),
    "every of 0": (about(every=0), "lacks every"),
    "no layers": (about(layers=None), "lacks the layers"),
    "a layer without a shape": (about(layers=[["a", None, "float32"]] * 3), "a layer must be"),
    "an unknown dtype": (about(layers=[["a", [1], "int8"]] * 3), "has dtype int8"),
    "a name twice": (about(layers=[["a", [200], "float32"]] * 3), "must be unique"),
    "fewer layers": (about(layers=[["a", [200], "float32"]]), "3 counts of positions do not fit 1 layers"),
}


@pytest.mark.parametrize(("spoil", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_is_no_recording_is_a_typed_error(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
):
    path = tmp_path / "run.npz"
    made(path)
    spoil(path)
    with pytest.raises(ConfigError, match=message):
        read(path)


# ------------------------------------------------------------------------------------------ which steps are kept


def test_a_full_recording_is_thinned_and_stays_spread_out():
    kept, told = Kept(10, 4), Kept(10, 4)
    for step in range(0, 1000, 10):
        if kept.due(step):
            kept.add(step, np.array([step], dtype=np.float32))
            told.add(step, None)
    assert kept.steps == told.steps == [0, 320, 640, 960]
    assert (kept.every, told.every, told.rows) == (320, 320, [])
    assert [int(row[0]) for row in kept.rows] == kept.steps


def test_a_recording_that_is_longer_than_its_limit_is_thinned_when_it_is_continued():
    kept = Kept(1, 4, [0, 1, 2, 3, 4, 5], [np.array([i], dtype=np.float32) for i in range(6)])
    assert (kept.steps, kept.every) == ([0, 2, 4], 2)
    assert [int(row[0]) for row in kept.rows] == kept.steps
