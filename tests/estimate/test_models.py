"""Where the layers of an estimate come from."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gradcomp import ConfigError, LayerSpec
from gradcomp.core.journal import Journal
from gradcomp.estimate.models import layers_of

#: Parameters and tensors, as the papers and the libraries that publish the weights count them.
KNOWN = {
    "resnet50": (25_557_032, 161),
    "bert-base": (109_482_240, 199),
    "gpt2-small": (124_439_808, 148),
    "lstm": (10_576_400, 11),
}


@pytest.mark.parametrize(("name", "counts"), KNOWN.items())
def test_built_in_models_have_the_known_numbers_of_parameters(name, counts):
    layers = layers_of(name)
    assert (sum(layer.size for layer in layers), len(layers)) == counts


def test_a_number_of_parameters_is_a_model():
    assert [sum(layer.size for layer in layers_of(text)) for text in ("300M", "1.3b")] == [
        300_000_000,
        1_300_000_000,
    ]


def test_files_and_functions_give_the_layers_that_have_gradients(tmp_path: Path, monkeypatch):
    expected = [LayerSpec("a.weight", (3, 5)), LayerSpec("a.bias", (3,), "float16")]
    tensors = {
        "a.weight": np.zeros((3, 5), np.float32),
        "a.bias": np.zeros(3, np.float16),
        "a.running_mean": np.zeros(3, np.float32),
        "a.steps": np.zeros((), np.int64),
    }
    file = str(tmp_path / "model.safetensors")
    save_file(tensors, file)
    assert sorted(layers_of(file), key=lambda layer: -layer.size) == expected
    journal = Journal(tmp_path / "run.jsonl")
    journal.run(2, "", "none", [LayerSpec("old", (1,))])
    journal.run(2, "", "none", expected)
    journal.close()
    assert layers_of(str(tmp_path / "run.jsonl")) == expected
    (tmp_path / "estimated_net.py").write_text(
        "import torch\n"
        "def make():\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))\n"
        "    net[1].weight.requires_grad = False\n"
        "    return net.to(torch.bfloat16), 'a batch'\n"
    )
    monkeypatch.chdir(tmp_path)
    names = {layer.name: (layer.shape, layer.dtype) for layer in layers_of("estimated_net:make")}
    assert names == {
        "0.weight": ((2, 4), "bfloat16"),
        "0.bias": ((2,), "bfloat16"),
        "1.bias": ((1,), "bfloat16"),
    }
    assert str(tmp_path) not in sys.path


BAD = {
    "unknown": ("resnet5000", "name one of resnet50, bert-base"),
    "no module": ("nowhere_at_all:make", "nowhere_at_all:make cannot be imported"),
    "no function": ("json:make", "json:make cannot be imported"),
    "no model": ("os:getcwd", "which has no named_parameters"),
    "no file": ("missing.safetensors", "cannot read missing.safetensors"),
    "no log": (__file__, "line 1: not a JSON object"),
}


@pytest.mark.parametrize(("model", "message"), BAD.values(), ids=BAD)
def test_other_models_are_errors_that_say_what_is_possible(model, message):
    with pytest.raises(ConfigError, match=message):
        layers_of(model)
