"""The checkpoints of a directory: which counts, and in which order things reach the disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradcomp.core.errors import StateError
from gradcomp.core.plan import Assignment, Plan
from gradcomp.exchange import checkpoint
from gradcomp.exchange.checkpoint import MANIFEST, Manifest
from gradcomp.exchange.fingerprint import Digests
from gradcomp.exchange.snapshot import Shared

SHARED = Shared(
    step=3,
    layers={"a": ((2,), "float32")},
    order=("a",),
    plan=Plan(0, (Assignment("a", "identity", None),)),
    cold=frozenset(),
    sparse=frozenset(),
    streaks={"a": 3},
    settings={"seed": 0, "slice_elements": 1, "cold_after_steps": 1, "reduction": "sra"},
)

#: What a test hears of the disk: (what, path), while ``listening`` is not None.
listening: list[tuple[str, str]] | None = None


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if listening is not None and event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
        place = arguments[1] if event == "os.rename" else arguments[0]
        if event != "open" or (isinstance(arguments[2], int) and arguments[2] & os.O_CREAT):
            listening.append((event.removeprefix("os."), str(place)))


sys.addaudithook(_hear)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch):
    """All that is created, synced, renamed and removed, in order."""
    global listening
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        assert listening is not None
        listening.append(("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    listening = []
    yield listening
    listening = None


def _save(directory: Path, name: str) -> None:
    writers: dict[str, Callable[[checkpoint.Sink], object]] = {
        checkpoint.rank_name(0, 1): lambda sink: sink.write(b"state"),
        "model.pt": lambda sink: sink.write(b"model"),
    }
    files = checkpoint.write_files(directory / name, writers)
    checkpoint.write_manifest(
        directory / name, Manifest(SHARED, files[:1], files[1:], Digests("crc32", {"a": 7}))
    )


def test_the_manifest_appears_after_all_that_it_names_is_on_disk(tmp_path, heard):
    directory, save = tmp_path / "new" / "job", "00000001.0123456789abcdef"
    _save(directory, save)
    checkpoint.remove_others(directory, [save])
    place = str(directory / save)
    published = heard.index(("rename", f"{place}/{MANIFEST}"))
    before, after = heard[:published], heard[published + 1 :]
    # Contents, names in the save, and the names of all directories that lead to it.
    for what in (f"{place}/rank-0-of-1.safetensors", f"{place}/model.pt", f"{place}/{MANIFEST}.partial"):
        assert before.index(("open", what)) < before.index(("fsync", what))
    made = [what for event, what in heard if event == "mkdir"]
    assert made == [str(tmp_path / "new"), str(directory), place]
    for what in made:
        assert ("fsync", str(Path(what).parent)) in before[before.index(("mkdir", what)) :]
    assert before.index(("fsync", place)) > before.index(("fsync", f"{place}/model.pt"))
    assert after[0] == ("fsync", place)


def test_an_old_checkpoint_loses_its_manifest_first(tmp_path, heard):
    names = [f"0000000{number}.0123456789abcdef" for number in (1, 2)]
    for name in names:
        _save(tmp_path, name)
    del heard[:]
    checkpoint.remove_others(tmp_path, names[1:])
    removed = [what.removeprefix(f"{tmp_path}/") for event, what in heard if event in ("remove", "rmdir")]
    assert removed[0] == f"{names[0]}/{MANIFEST}"
    assert sorted(removed[1:3]) == [f"{names[0]}/model.pt", f"{names[0]}/rank-0-of-1.safetensors"]
    assert checkpoint.complete(tmp_path) == names[1:]


def test_the_last_complete_one_counts(tmp_path):
    with pytest.raises(StateError, match="there is no checkpoint"):
        checkpoint.last(tmp_path / "nowhere")
    for number in (9, 10, 100000000):
        _save(tmp_path, f"{number:08d}.{'0' * 16}")
    (tmp_path / "200000000.0000000000000000").mkdir()  # no manifest
    (tmp_path / "300000000").mkdir()  # another program's
    assert checkpoint.last(tmp_path) == "100000000.0000000000000000"
    assert checkpoint.new_name(tmp_path).startswith("200000001.")
    name = checkpoint.last(tmp_path)
    assert checkpoint.last(tmp_path / name) == checkpoint.ITSELF


def test_other_files_stay(tmp_path):
    save = tmp_path / "00000001.0123456789abcdef"
    _save(tmp_path, save.name)
    for path in (tmp_path / MANIFEST, tmp_path / "model.pt", tmp_path / "notes", save / "notes"):
        path.write_text("{}")
    checkpoint.remove_others(tmp_path, [])
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == [f"{save.name}/notes", MANIFEST, "model.pt", "notes"]


def test_names_stay_inside_of_the_directory():
    for name in ("", "..", "/", "../00000001.0123456789abcdef", "00000001.0123456789abcdef/..", 3, None):
        assert not checkpoint.is_name(name)
    assert checkpoint.is_name("00000001.0123456789abcdef")


@pytest.mark.parametrize("values", [None, {}, [1], {"a": -1}, {"a": 1 << 32}, {"a": True}, 3], ids=str)
def test_digests_are_numbers_of_32_bits_and_name_what_differs(values):
    one = Digests("crc32", {"a": 1, "b": 2, "c": 3})
    assert Digests.from_plain(one.to_plain()) == one
    assert one.differing(Digests("crc32", {"c": 3, "b": 9, "more": 1})) == ["a", "b"]
    plain = {"algorithm": "crc32", "values": values} if values else values
    for wrong in (plain, {"algorithm": 3, "values": {}}):
        with pytest.raises(StateError, match="digest"):
            Digests.from_plain(wrong)
