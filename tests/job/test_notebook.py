"""A job one of whose ranks is a notebook's kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest
from launching import clean_environment, plain_variables
from ports import free_port

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: pip install gradcomp[test]")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

TRAIN = """
import time
import torch
import gradcomp.torch as gc
from gradcomp.job import runtime

gc.init(timeout_seconds=60)
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
opt = gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
model(torch.ones(2, 8)).sum().backward()
opt.step()
"""
#: It evaluates while the other is at its end.
PEER = TRAIN + "time.sleep(3)\nprint(runtime.current().exchangers[0].error)\n"


@pytest.mark.full
def test_an_old_typo_in_a_notebook_does_not_abort_the_other_ranks(tmp_path):
    program = tmp_path / "peer.py"
    program.write_text(PEER)
    port = str(free_port())
    environment = [{**clean_environment(), **plain_variables(rank, 2, port)} for rank in range(2)]
    peer = subprocess.Popen(
        [sys.executable, str(program)], env=environment[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        cells = [TRAIN, "undefined_name", "gc.shutdown()"]
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        client = nbclient.NotebookClient(notebook, timeout=90, kernel_name="python3", allow_errors=True)
        client.execute(env=environment[0])
        stdout, stderr = peer.communicate(timeout=60)
    finally:
        peer.kill()
        peer.wait()
    errors = [
        output.ename for cell in notebook.cells for output in cell.outputs if output.output_type == "error"
    ]
    assert errors == ["NameError"]
    assert (peer.returncode, stdout) == (0, "None\n"), stderr
