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
    ours.remove("fake")  # whose runs refuse to save
    assert {text.partition(":")[0].partition("[")[0] for text in COMPRESSIONS} == ours
    with zipfile.ZipFile(HERE / "golden" / "checkpoints.zip") as archive:
        archive.extractall(tmp_path)
    program = (HERE.parent / "old_checkpoints.py").read_text()
    for rank in run_ranks(
        program, 2, arguments=("resume", str(tmp_path)), imported=("torch", "gradcomp.torch")
    ):
        assert rank.returncode == 0, rank.stderr
