"""mypy and pyright accept the code of README.md and docs/recipes.md, and the examples, as a user's checkers would."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documented import README, RECIPES, ROOT, blocks

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

#: What the code of README.md takes from the user's script.
DDP = "import torch\n\nmodel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))\n"
KERAS = "import keras\n\nmodel = keras.Sequential()\ndata = None\n\n"
BEFORE = {"whole": "", "lines": DDP, "keras": KERAS}

#: What each class has, and a variable of the wrapped optimizer's type keeps.
USES = """
import torch
import gradcomp.torch as gc

model = torch.nn.Linear(4, 2)
opt = torch.optim.AdamW(model.parameters())
opt = gc.DistributedOptimizer(opt, named_parameters=model.named_parameters())
ratio: float = opt.statistics().ratio
opt.synchronize()
with opt.no_sync():
    pass
with opt.skip_synchronize():
    opt.step()
opt.set_compression(gc.Policy(gc.TopK(0.01), {"head.*": "none"}, gc.Filter(min_elements=64)))
state: dict[str, object] = opt.compression_state()
plain: torch.optim.Optimizer = opt
same: torch.optim.AdamW = opt
torch.amp.GradScaler("cpu").step(opt)
torch.optim.lr_scheduler.StepLR(opt, 1)
gc.save("directory", opt, model=model)

hook_state, hook = gc.ddp_comm_hook(model, compression="bf16")
torch.nn.parallel.DistributedDataParallel(model).register_comm_hook(hook_state, hook)
steps: int = hook_state.statistics().steps
hook_state.settle()

sharded = gc.compress_fsdp(model, optimizer=opt)
with sharded.exact_weights():
    sent: int = sharded.statistics().gradient_bytes
"""

KERAS_USES = """
import keras
import gradcomp.tf as gc

opt = keras.optimizers.SGD(0.05)
opt = gc.DistributedOptimizer(opt, compression=gc.Quantize(bits=4))
ratio: float = opt.statistics().ratio
opt.set_compression("none")
keras.Sequential().compile(opt, loss="mse")
"""

#: Must be refused, or the checkers see nothing of what is checked above.
WRONG = """
import torch
import gradcomp.torch as gc

model = torch.nn.Linear(4, 2)
opt = gc.DistributedOptimizer(torch.optim.SGD(model.parameters()), compression="topk")
ratio: str = opt.statistics().ratio
opt.set_compression(4)
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of scripts; libraries without types count as untyped, whatever pyright would guess."""
    folder = tmp_path_factory.mktemp("code")
    start, *recipes = blocks(RECIPES)
    for number, (_, block) in enumerate(recipes):
        (folder / f"recipe_{number}.py").write_text(start[1] + block, encoding="utf-8")
    for (name, before), (_, block) in zip(BEFORE.items(), blocks(README), strict=True):
        (folder / f"readme_{name}.py").write_text(before + block, encoding="utf-8")
    for example in (ROOT / "examples").glob("*.py"):
        shutil.copy(example, folder)
    for name, text in {"uses": USES, "keras_uses": KERAS_USES, "wrong": WRONG}.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    # A DistributedSampler's type is not inferred by torch's annotations. Strict users forbid implicit re-exports.
    (folder / "mypy.ini").write_text(
        "[mypy]\nignore_missing_imports = true\ndisable_error_code = var-annotated\nimplicit_reexport = false\n"
    )
    guesses = ("useLibraryCodeForTypes", "reportMissingModuleSource", "reportMissingTypeStubs")
    (folder / "pyrightconfig.json").write_text(json.dumps(dict.fromkeys(guesses, False)))
    return folder


def found(command: list[str], folder: Path, pattern: str) -> dict[str, list[str]]:
    """The lines of a checker that report an error, by script."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=800, check=False)
    errors = [line.strip() for line in done.stdout.splitlines() if pattern in line]
    by_script: dict[str, list[str]] = {}
    for line in errors:
        by_script.setdefault(Path(line.partition(":")[0]).stem, []).append(line)
    assert done.returncode == 1, done.stdout + done.stderr
    return by_script


def check(errors: dict[str, list[str]]) -> None:
    """Only what is wrong is refused, both lines of it."""
    assert len(errors.pop("wrong", [])) == 2
    assert not errors


def test_mypy_accepts_what_users_write(code: Path):
    pytest.importorskip("mypy", reason="needs mypy: the extra lint")
    scripts = sorted(path.name for path in code.glob("*.py"))
    cache = f"--cache-dir={ROOT / '.mypy_cache' / 'documented'}"
    check(found([sys.executable, "-m", "mypy", "--config-file=mypy.ini", cache, *scripts], code, ": error:"))


def test_pyright_accepts_what_users_write(code: Path):
    pytest.importorskip("pyright", reason="needs pyright: the extra lint")
    pyright = [sys.executable, "-m", "pyright"]
    works = subprocess.run([*pyright, "--version"], capture_output=True, text=True, timeout=300, check=False)
    if works.returncode != 0:
        pytest.skip(f"pyright could not fetch what it needs: {works.stderr.strip()[-200:]}")
    check(found([*pyright, "--pythonpath", sys.executable], code, " - error:"))
