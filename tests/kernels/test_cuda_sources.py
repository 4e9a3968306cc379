"""Every module compiles, into the arithmetic of the other backends, and has the kernels that are launched from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernels import nvrtc
from tiers import every_value

from gradcomp.kernels.cuda import modules as modules_module
from gradcomp.kernels.cuda.modules import Module, holding, modules

FOLDER = Path(modules_module.__file__).parent
ARCHITECTURE = 75
"""The oldest that gradcomp is for. Instructions of newer ones convert numbers; nothing else differs in our sources."""


def parts(module: Module) -> tuple[str, ...]:
    """Its source with what it is compiled for, and the class of the codec."""
    return f"{module.source} {module.family}", module.defines[0][1] if module.defines else ""


@pytest.mark.parametrize("module", every_value(modules(), parts), ids=str)
def test_compiles(module: Module) -> None:
    text = nvrtc.ptx(module, ARCHITECTURE)
    assert f".target sm_{ARCHITECTURE}" in text
    assert sorted(re.findall(r"\.visible \.entry (\w+)", text)) == sorted(module.kernels)
    for forbidden in (r"\bfma\.", r"\.ftz\b", r"\bdiv\.(approx|full)", r"\bsqrt\.approx", r"\brcp\.(?!rn)"):
        found = re.search(forbidden, text)
        assert found is None, f"{module}: {found[0]} does not round as the other backends do"
    for kernel, size in shared_bytes(text).items():
        assert size <= 48 << 10, f"{module}: {kernel} shares {size} bytes, for which it would have to ask"


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_compiles_for_newer_devices(architecture: int) -> None:
    module = holding("encode.cu", "encode_nearest", {"GRADCOMP_CLASS": "MinMax"})
    assert f".target sm_{architecture}" in nvrtc.ptx(module, architecture)


@pytest.mark.parametrize(("name", "kind"), [("E4M3", "e4m3x2"), ("E5M2", "e5m2x2")])
def test_a_newer_device_converts_to_eight_bits_by_its_instruction(name: str, kind: str) -> None:
    """To nearest; draws, and what the instruction does not know, take the arithmetic of the other backends."""
    word = f"cvt.rn.satfinite.{kind}.f32"
    defines = {"GRADCOMP_CLASS": f"BlockFloat<{name}>"}
    module = holding("encode.cu", "encode_nearest", defines)
    assert word in nvrtc.ptx(module, 89)
    assert nvrtc.cubin(module, 90)
    assert "satfinite" not in nvrtc.ptx(module, ARCHITECTURE)
    assert "satfinite" not in nvrtc.ptx(holding("encode.cu", "encode_stochastic", defines), 89)


def test_every_kernel_of_every_source_is_in_a_module() -> None:
    listed = {(module.source, kernel) for module in modules() for kernel in module.kernels}
    kernels = re.compile(r"^(?:PAIRED_)?KERNEL\(.*\) (\w+)\(const", re.M)
    written = {
        (path.name, name) for path in FOLDER.glob("*.cu") for name in kernels.findall(path.read_text())
    }
    assert listed == written


def test_a_kernel_is_in_one_module_for_each_of_its_definitions() -> None:
    found = [(module.source, kernel, module.defines) for module in modules() for kernel in module.kernels]
    assert len(found) == len(set(found))


def test_what_is_in_no_module_cannot_be_launched() -> None:
    with pytest.raises(RuntimeError, match=r"no module has encode_nearest.*NoSuchClass.*modules.py"):
        holding("encode.cu", "encode_nearest", {"GRADCOMP_CLASS": "NoSuchClass"})


def shared_bytes(text: str) -> dict[str, int]:
    """What the threads of a block share, by kernel."""
    head, *kernels = re.split(r"\.visible \.entry ", text)
    declared = r"^\s*\.shared .*\[(\d+)\];$"
    common = sum(map(int, re.findall(declared, head, re.M)))
    return {
        kernel.split("(")[0]: common + sum(map(int, re.findall(declared, kernel, re.M))) for kernel in kernels
    }


def test_shared_memory_is_counted() -> None:
    sizes = shared_bytes(nvrtc.ptx(holding("sums.cu", "tail", {}), ARCHITECTURE))
    assert sizes == {"squares": 16 * 8, "join": 16 * 8, "tail": 16 * 8 + 8 * 8 + 8 * 4}


@pytest.mark.parametrize(
    ("source", "kernel"),
    [("encode.cu", "encode_nearest"), ("encode.cu", "reduce_nearest"), ("decode.cu", "decode")],
)
def test_the_next_tile_is_fetched(source: str, kernel: str) -> None:
    text = nvrtc.ptx(holding(source, kernel, {"GRADCOMP_CLASS": "MinMax"}), ARCHITECTURE)
    body = text[text.index(f".entry {kernel}(") :]
    assert "%nctaid" in body  # a tile is as far from the next one as there are blocks
    assert "prefetch.global.L2" in body


def test_whole_warps_wait_for_each_other() -> None:
    """A mask that depends on a thread, or on who is there, makes the compiler look for threads at every exchange."""
    waits = re.compile(r"__\w+_sync\((\w+)|__syncwarp\((\w*)")
    texts = {path.name: modules_module.flat(path.name) for path in FOLDER.glob("*.cu")}
    found = {(name, "".join(masks)) for name, text in texts.items() for masks in waits.findall(text)}
    assert ("encode.cu", "whole_warp") in found
    assert {mask for _, mask in found} <= {"", "whole_warp", "0xFFFFFFFF"}
    assert not any("__activemask" in text for text in texts.values())


def test_a_source_is_one_text() -> None:
    text = modules_module.flat("encode.cu")
    assert "#include" not in text
    assert text.count("class MinMax {") == 1


def test_mistakes_in_a_source_are_the_compilers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Module, "text", lambda module: "__global__ void f() { nonsense; }")
    with pytest.raises(RuntimeError, match="nonsense"):
        nvrtc.ptx(modules()[0], ARCHITECTURE)


SCALED_HALF = {"GRADCOMP_CLASS": "ScaledHalf"}


@pytest.mark.parametrize(
    ("module", "instructions"),
    [
        (holding("encode.cu", "encode_nearest", SCALED_HALF), ("cvt.rn.f16.f32", "cvt.f32.f16")),
        (holding("decode.cu", "decode", SCALED_HALF), ("cvt.rn.f16.f32", "cvt.f32.f16", "cvt.rn.bf16.f32")),
        (holding("sums.cu", "squares", {}), ("cvt.f32.f16",)),
    ],
    ids=str,
)
def test_half_precision_is_converted_by_an_instruction(module: Module, instructions: tuple[str, ...]) -> None:
    assert set(instructions) <= set(re.findall(r"\bcvt[.\w]+", nvrtc.ptx(module, 80)))


def test_bfloat16_is_rounded_by_integers_where_there_is_no_instruction() -> None:
    module = holding("encode.cu", "encode_nearest", {"GRADCOMP_CLASS": "Bfloat16"})
    assert "bf16" not in nvrtc.ptx(module, 75)
