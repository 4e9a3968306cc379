"""What CuPy loads is what our options say: CuPy's own compilation would flush numbers near zero to zero."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="needs CuPy: pip install 'gradcomp[cuda]'", exc_type=ImportError)

from gradcomp.kernels.cuda import built


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kept"))
    built._folder.cache_clear()
    yield tmp_path / "kept"
    built._folder.cache_clear()


def test_a_device_newer_than_the_compiler_gets_ptx(folder: Path) -> None:
    text = built.built("draws.cu", {}, 999).read_text()
    assert ".entry" in text
    assert ".ftz" not in text
    assert "fma.rn.f32" not in text


def test_a_known_device_gets_its_own_code_once(folder: Path) -> None:
    first = built.built("draws.cu", {}, 90)
    assert first.read_bytes()[:4] == b"\x7fELF"
    written = first.stat().st_mtime_ns
    assert built.built("draws.cu", {}, 90) == first
    assert first.stat().st_mtime_ns == written
    assert [each.name for each in folder.iterdir()] == [first.name]


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)draws.cu does not compile.*error"):
        built.built("draws.cu", {"draws": "1"}, 90)


def test_a_folder_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "below"))
    built._folder.cache_clear()
    try:
        assert built.built("draws.cu", {}, 80).exists()
    finally:
        built._folder.cache_clear()
