"""Checkpoints of earlier versions load, and training goes on with the means that it would have had."""

import zipfile
from pathlib import Path

from launching import run_ranks
from old_checkpoints import COMPRESSIONS

from gradcomp.compress.registry import registered

HERE = Path(__file__).parent


def test_a_checkpoint_of_every_compressor_is_resumed(tmp_path):
    # A benchmark that was imported here may have registered its own.
    ours = {name for name, kind in registered().items() if kind.__module__.startswith("gradcomp.")}
    ours -= {"fake", "flat", "chunked_topk"}  # the runs of fake refuse to save, and the others came later
    assert {text.partition(":")[0].partition("[")[0] for text in COMPRESSIONS} == ours
    resume("checkpoints.zip", tmp_path)


def test_nets_of_four_deconvolutions_go_on(tmp_path):
    resume("nets.zip", tmp_path, "nets")


def resume(archive: str, folder: Path, *which: str) -> None:
    with zipfile.ZipFile(HERE / "golden" / archive) as saved:
        saved.extractall(folder)
    program, arguments = (HERE.parent / "old_checkpoints.py").read_text(), ("resume", str(folder), *which)
    for rank in run_ranks(program, 2, arguments=arguments, imported=("torch", "gradcomp.torch")):
        assert rank.returncode == 0, rank.stderr
