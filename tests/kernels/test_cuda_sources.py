"""Every CUDA source compiles for every architecture that gradcomp is for, into the arithmetic of the other bodies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernels import nvrtc

from gradcomp.kernels.cuda import source
from gradcomp.kernels.cuda.call import THREADS
from gradcomp.kernels.cuda.codec import CLASSES

FOLDER = Path(source.__file__).parent
ARCHITECTURES = (75, 80, 90)

#: What the sources of the codecs are compiled for; the others take no definitions.
DEFINES = {
    "encode.cu": [{"GRADCOMP_CLASS": name} for name in CLASSES],
    "decode.cu": [{"GRADCOMP_CLASS": name} for name in CLASSES],
    "losses.cu": [{"GRADCOMP_CLASS": name} for name in CLASSES],
}
MODULES = [(path.name, one) for path in sorted(FOLDER.glob("*.cu")) for one in DEFINES.get(path.name, [{}])]
MODULES += [("encode.cu", one | {"GRADCOMP_TEAM": THREADS}) for one in DEFINES["encode.cu"]]


@pytest.mark.parametrize(
    ("name", "defines"), MODULES, ids=["-".join([name, *map(str, one.values())]) for name, one in MODULES]
)
def test_compiles(name: str, defines: dict[str, object]) -> None:
    # What differs between architectures is not in our sources: all codecs for one of them, one codec for all.
    every = defines.get("GRADCOMP_CLASS", CLASSES[0]) == CLASSES[0]
    for architecture in ARCHITECTURES if every else (80,):
        text = nvrtc.ptx(name, defines, architecture)
        assert f".target sm_{architecture}" in text
        assert re.search(r"\.visible \.entry \w+", text)
        for forbidden in (
            r"\bfma\.",
            r"\.ftz\b",
            r"\bdiv\.(approx|full)",
            r"\bsqrt\.approx",
            r"\brcp\.(?!rn)",
        ):
            found = re.search(forbidden, text)
            assert found is None, f"{name}: {found[0]} does not round as the other bodies do"
        for kernel, size in shared_bytes(text).items():
            assert size <= 48 << 10, f"{name}: {kernel} shares {size} bytes, for which it would have to ask"


def shared_bytes(text: str) -> dict[str, int]:
    """What the threads of a block share, by kernel."""
    head, *kernels = re.split(r"\.visible \.entry ", text)
    declared = r"^\s*\.shared .*\[(\d+)\];$"
    common = sum(map(int, re.findall(declared, head, re.M)))
    return {
        kernel.split("(")[0]: common + sum(map(int, re.findall(declared, kernel, re.M))) for kernel in kernels
    }


def test_shared_memory_is_counted() -> None:
    sizes = shared_bytes(nvrtc.ptx("sums.cu", {}, 80))
    assert sizes == {"squares": 16 * 8, "join": 16 * 8, "tail": 16 * 8 + 8 * 8 + 8 * 4}


def test_a_source_is_one_text() -> None:
    text = source.flat("encode.cu")
    assert "#include" not in text
    assert text.count("class MinMax {") == 1


def test_mistakes_in_a_source_are_the_compilers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "flat", lambda name: "__global__ void f() { nonsense; }")
    with pytest.raises(AssertionError, match="nonsense"):
        nvrtc.ptx("encode.cu", {}, 80)
