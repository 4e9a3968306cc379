"""What CuPy loads: whole files, built as our options say, or found in the package."""

from __future__ import annotations

import logging
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from gradcomp.kernels.cuda import cubins, modules, nvrtc
from gradcomp.kernels.cuda.modules import Module, holding, whole

DRAWS = holding("draws.cu", "draw_indices", {})
CUDA_13 = 13000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(modules, "PACKAGED", tmp_path / "cubins")
    modules._folder.cache_clear()
    yield tmp_path / "kept"
    modules._folder.cache_clear()


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The code of a module for 8.0 and 9.0, in the package; from then on there is no compiler."""
    cubins.build(tmp_path / "cubins", (80, 90), [DRAWS], jobs=1)

    def none() -> None:
        raise ImportError("no compiler")

    monkeypatch.setattr(modules, "installed", none)
    return tmp_path / "cubins"


def end_of_tables(code: bytes) -> int:
    """Of an ELF file: where the later of its two tables ends."""
    header = struct.unpack("<16xHHIQQQIHHHHHH", code[:64])
    programs, sections, sizes = header[4], header[5], header[8:12]
    return max(programs + sizes[0] * sizes[1], sections + sizes[2] * sizes[3])


def test_a_device_newer_than_the_compiler_gets_ptx() -> None:
    text = modules.built(DRAWS, 999, CUDA_13).read_text()
    assert ".entry" in text
    assert ".ftz" not in text
    assert "fma.rn.f32" not in text
    assert "\0" not in text


def test_a_file_ends_where_its_header_says() -> None:
    code = modules.built(DRAWS, 90, CUDA_13).read_bytes()
    assert len(code) == end_of_tables(code)


def test_a_file_without_its_last_byte_is_not_whole() -> None:
    code = modules.built(DRAWS, 90, CUDA_13).read_bytes()
    assert whole(code)
    assert not whole(code[:-1])
    assert not whole(code[:40])
    assert not whole(b"")


def test_ptx_without_its_end_is_not_whole() -> None:
    text = modules.built(DRAWS, 999, CUDA_13).read_bytes()
    assert whole(text)
    assert not whole(text[: len(text) // 2])


def test_a_known_device_gets_its_own_code_once(folder: Path) -> None:
    first = modules.built(DRAWS, 90, CUDA_13)
    written = first.stat().st_mtime_ns
    assert modules.built(DRAWS, 90, CUDA_13) == first
    assert first.stat().st_mtime_ns == written
    assert [each.name for each in folder.iterdir()] == [first.name]


def test_a_kept_file_that_is_not_whole_is_built_again() -> None:
    kept = modules.built(DRAWS, 90, CUDA_13)
    code = kept.read_bytes()
    kept.write_bytes(code[:-1])
    assert modules.built(DRAWS, 90, CUDA_13).read_bytes() == code


def test_code_that_is_not_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = nvrtc.Nvrtc.compile

    def shortened(*arguments: object) -> tuple[bytes, str]:
        code, log = compile_(*arguments)
        return code[:-1], log

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", shortened)
    with pytest.raises(RuntimeError, match=r"draws.cu: NVRTC gave \d+ bytes for sm_90"):
        modules.built(DRAWS, 90, CUDA_13)


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words() -> None:
    wrong = Module("draws.cu", ("draw_indices",), (("draw_indices", "1"),))
    with pytest.raises(RuntimeError, match=r"(?s)draws.cu: does not compile.*error"):
        modules.built(wrong, 90, CUDA_13)


def test_where_the_folder_cannot_be_written_the_file_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    modules._folder.cache_clear()
    assert whole(modules.built(DRAWS, 80, CUDA_13).read_bytes())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("capability", "architecture"), [(90, "sm_90"), (80, "sm_80"), (86, "sm_80")])
def test_the_packages_code_needs_no_compiler(packaged: Path, capability: int, architecture: str) -> None:
    found = modules.built(DRAWS, capability, CUDA_13)
    assert found == packaged / "13.0" / f"{DRAWS.digest(architecture, (13, 0))}.cubin"


@pytest.mark.parametrize(
    ("capability", "cuda"), [(75, CUDA_13), (100, CUDA_13), (90, 12090)], ids=["older", "newer", "driver"]
)
def test_other_devices_and_older_drivers_do_not_get_it(packaged: Path, capability: int, cuda: int) -> None:
    with pytest.raises(ImportError, match="no compiler"):
        modules.built(DRAWS, capability, cuda)


def test_a_changed_source_does_not_get_it(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = DRAWS.text()
    monkeypatch.setattr(Module, "text", lambda module: text + "\n")
    with pytest.raises(ImportError, match="no compiler"):
        modules.built(DRAWS, 90, CUDA_13)


def test_the_packages_code_is_not_used_if_it_is_damaged(
    packaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = modules.built(DRAWS, 90, CUDA_13)
    found.write_bytes(found.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "gradcomp"), pytest.raises(ImportError, match="no compiler"):
        modules.built(DRAWS, 90, CUDA_13)
    assert "is damaged" in caplog.text


def test_cubins_are_built_once_and_old_ones_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cubins.build(tmp_path / "cubins", (90,), [DRAWS], jobs=1)
    (tmp_path / "cubins" / "13.0" / "old.cubin").touch()
    capsys.readouterr()
    cubins.build(tmp_path / "cubins", (90,), [DRAWS], jobs=1)
    assert "0 of 1 files built" in capsys.readouterr().out
    assert len(list((tmp_path / "cubins" / "13.0").iterdir())) == 1


def test_cupys_compiler_is_found_where_it_is_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    path = next(iter(nvrtc._of_wheels()))
    opened = []
    cuda = ModuleType("cupy.cuda")
    # As in CuPy 14: a name in cupy.cuda, whose module has another name.
    cuda.nvrtc = SimpleNamespace(getVersion=lambda: opened.append(nvrtc.Nvrtc(path)))
    cupy = ModuleType("cupy")
    cupy.cuda, cupy.__path__, cuda.__path__ = cuda, [], []
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    assert str(Path(path).resolve()) in [str(Path(found).resolve()) for found in nvrtc._of_cupy()]
    assert opened
