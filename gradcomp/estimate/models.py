"""The layers of a model: a built-in one, or one from the user's function, a safetensors file or a run log.

Layers are in the order of the forward pass; the backward pass computes their gradients in the reverse order.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from gradcomp.core.errors import ConfigError
from gradcomp.core.journal import read_run
from gradcomp.core.layers import ITEM_BYTES, LayerSpec, check_unique

Shapes = Iterable[tuple[str, tuple[int, ...]]]

#: Elements of safetensors files, by their name there.
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([mMbB])")
#: Tensors in files that no gradient is computed for.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "position_ids", "masked_bias")


def layers_of(model: str) -> list[LayerSpec]:
    """Returns the layers of a model.

    Args:
        model: a name of :data:`MODELS`; a number of parameters as ``300M``, for that many in layers of a million;
            ``package:function``, whose result has ``named_parameters()`` or
            ``trainable_variables``, or is a tuple that begins with such a model; the path of a safetensors file; or
            that of a run log, whose last run counts.

    Raises:
        ConfigError: for anything else, and for a model without parameters.
    """
    if model in MODELS:
        return _specs(MODELS[model]())
    if count := _COUNT.fullmatch(model):
        millions = max(round(float(count[1]) * (1000 if count[2] in "bB" else 1)), 1)
        return [LayerSpec(f"layer{i}.weight", (1000, 1000)) for i in range(millions)]
    if model.endswith(".safetensors"):
        return _check(model, _from_safetensors(model))
    if Path(model).is_file():
        return _check(model, list(read_run(model)[0].layers))
    module, colon, function = model.partition(":")
    if not colon:
        raise ConfigError(
            f"there is no model and no file {model!r}: name one of {', '.join(MODELS)}, a number as "
            "300M, package:function, a safetensors file or a run log"
        )
    return layers_in(model, call(module, function))


def call(module: str, function: str) -> Any:
    """Returns what the user's function returns; its module may lie in the working directory."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{module}:{function} cannot be imported: {error}") from error
    finally:
        sys.path.pop(0)
    return found()


def layers_in(model: str, made: Any) -> list[LayerSpec]:
    """Returns the layers of what the user's function returned: a model, or a tuple that begins with one."""
    made = made[0] if isinstance(made, tuple) and made else made
    if hasattr(made, "named_parameters"):
        named = [(name, p) for name, p in made.named_parameters() if p.requires_grad]
    elif hasattr(made, "trainable_variables"):
        named = [(getattr(v, "path", v.name), v) for v in made.trainable_variables]
    else:
        raise ConfigError(f"{model} returned a {type(made).__name__}, which has no named_parameters()")
    layers = []
    for name, values in named:
        dtype = str(values.dtype).rpartition(".")[2]
        layers.append(LayerSpec(name, tuple(map(int, values.shape)), dtype))
    return _check(model, layers)


def _from_safetensors(path: str) -> list[LayerSpec]:
    from safetensors import SafetensorError, safe_open

    layers = []
    try:
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                part = file.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is not None and not name.endswith(_BUFFERS):
                    layers.append(LayerSpec(name, tuple(part.get_shape()), dtype))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return layers


def _check(model: str, layers: list[LayerSpec]) -> list[LayerSpec]:
    if not sum(layer.size for layer in layers):
        raise ConfigError(f"{model}: there are no parameters of {', '.join(ITEM_BYTES)}")
    check_unique(layers)
    return layers


# ------------------------------------------------------------------------------------------ built-in models


def _specs(shapes: Shapes) -> list[LayerSpec]:
    return [LayerSpec(name, shape) for name, shape in shapes]


def _linear(name: str, inputs: int, outputs: int) -> Shapes:
    return [(f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,))]


def _norm(name: str, width: int) -> Shapes:
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]


def _lstm(words: int = 10_000, width: int = 400, layers: int = 2) -> Shapes:
    """Returns the word LSTM of the benchmarks."""
    yield "embedding.weight", (words, width)
    for layer in range(layers):
        for kind in ("weight_ih", "weight_hh"):
            yield f"lstm.{kind}_l{layer}", (4 * width, width)
        for kind in ("bias_ih", "bias_hh"):
            yield f"lstm.{kind}_l{layer}", (4 * width,)
    yield from _linear("output", width, words)


def _resnet50(classes: int = 1000) -> Shapes:
    """Returns ResNet-50 of He et al. 2016, with the names of torchvision."""
    yield "conv1.weight", (64, 3, 7, 7)
    yield from _norm("bn1", 64)
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3), 1):
        width = 32 << stage
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            sizes = ((width, inputs, 1), (width, width, 3), (4 * width, width, 1))
            for number, (outputs, before, kernel) in enumerate(sizes, 1):
                yield f"{name}.conv{number}.weight", (outputs, before, kernel, kernel)
                yield from _norm(f"{name}.bn{number}", outputs)
            if block == 0:
                yield f"{name}.downsample.0.weight", (4 * width, inputs, 1, 1)
                yield from _norm(f"{name}.downsample.1", 4 * width)
            inputs = 4 * width
    yield from _linear("fc", inputs, classes)


def _bert_base(words: int = 30_522, width: int = 768, blocks: int = 12) -> Shapes:
    """Returns BERT-base, uncased, of Devlin et al. 2019, with its pooler and without a head."""
    for name, rows in (("word", words), ("position", 512), ("token_type", 2)):
        yield f"embeddings.{name}_embeddings.weight", (rows, width)
    yield from _norm("embeddings.LayerNorm", width)
    for block in range(blocks):
        name = f"encoder.layer.{block}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            yield from _linear(f"{name}.attention.{part}", width, width)
        yield from _norm(f"{name}.attention.output.LayerNorm", width)
        yield from _linear(f"{name}.intermediate.dense", width, 4 * width)
        yield from _linear(f"{name}.output.dense", 4 * width, width)
        yield from _norm(f"{name}.output.LayerNorm", width)
    yield from _linear("pooler.dense", width, width)


def _gpt2_small(words: int = 50_257, width: int = 768, blocks: int = 12, length: int = 1024) -> Shapes:
    """Returns GPT-2 small of Radford et al. 2019; its output layer is the embedding."""
    yield "wte.weight", (words, width)
    yield "wpe.weight", (length, width)
    for block in range(blocks):
        yield from _norm(f"h.{block}.ln_1", width)
        yield from _linear(f"h.{block}.attn.c_attn", width, 3 * width)
        yield from _linear(f"h.{block}.attn.c_proj", width, width)
        yield from _norm(f"h.{block}.ln_2", width)
        yield from _linear(f"h.{block}.mlp.c_fc", width, 4 * width)
        yield from _linear(f"h.{block}.mlp.c_proj", 4 * width, width)
    yield from _norm("ln_f", width)


MODELS: Mapping[str, Callable[[], Shapes]] = {
    "resnet50": _resnet50,
    "bert-base": _bert_base,
    "gpt2-small": _gpt2_small,
    "lstm": _lstm,
}
