"""``Sensitivity`` measures the training loss with some layers' steps changed, without a trace in training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.func import functional_call
from torch.utils._pytree import tree_map

from gradcomp.core.errors import ConfigError
from gradcomp.core.vectors import Floats
from gradcomp.torch.layers import Named
from gradcomp.torch.modules import bare

#: The second moment in the state of Adam, RMSprop and Adagrad, by whose root they divide the gradient.
_SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")


class Sensitivity:
    """The training loss on a batch that is held back, for ``LGreCo(metric="loss")``.

        batch = next(batches)
        sensitivity = gc.Sensitivity(model, lambda model: cross_entropy(model(batch[0]), batch[1]))
        opt = gc.DistributedOptimizer(opt, model.named_parameters(), ..., controller=..., sensitivity=sensitivity)

    The loss is computed in ``step()``, on the training thread, after the parameters were updated. It is computed
    without autograd, by a functional call that replaces parameters and buffers by copies, one of them perturbed. The
    copies are float64, because float32 rounds many changes away, and so are the floating-point arguments that the
    module is then called with. Parameters, buffers, gradients and the random states of PyTorch, NumPy and Python are
    then as before, bit for bit, and so are the modules' modes; state that a module keeps elsewhere is not restored.
    All forward passes of a step draw the same random numbers. Forward hooks of the modules are called.

    Args:
        model: the module whose parameters the optimizer has. One in DistributedDataParallel or torch.compile is called
            without these.
        loss: called with the module, and returns the mean loss of the batch, one number. Each rank may hold another
            batch. The module is in the mode in which it is found; ``loss`` may change it.
        double: False computes in the module's own types, for modules that cannot compute in float64, and where that
            takes too long. Changes below about 1e-7 of the loss are then noise.

    Memory: 8 bytes an element of the module while losses are computed; with ``double=False`` 4 of the largest layer.
    Raises ConfigError for anything else.
    """

    def __init__(
        self, model: torch.nn.Module, loss: Callable[[Any], torch.Tensor], *, double: bool = True
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"sensitivity: expected a torch.nn.Module, got {type(model).__name__}")
        if not callable(loss):
            raise ConfigError(f"sensitivity: expected a function of the module, got {loss!r:.80}")
        self._model = bare(model)
        self._called = _Called(self._model, loss)
        self._names: dict[int, str] = {}
        self._double = double

    def check(self, named: Named, optimizer: torch.optim.Optimizer) -> None:
        """Raise ConfigError unless the module has these parameters and the optimizer a learning rate."""
        self._names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for name, parameter in named:
            if id(parameter) not in self._names:
                raise ConfigError(f"sensitivity: the module has no parameter {name!r} of the optimizer")
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise ConfigError(
                f"sensitivity: losses are measured after a step of the learning rate, and {type(optimizer).__name__} "
                "has none in its param_groups"
            )

    @torch.no_grad()
    def changes(
        self,
        named: Named,
        optimizer: torch.optim.Optimizer,
        summands: int,
        cells: Sequence[tuple[int, Floats]],
    ) -> list[float]:
        """Return by how much the loss changes for each layer and error: see :data:`gradcomp.control.base.Probe`.

        ``summands`` is the number of ranks if their gradients are summed, 1 if they are averaged.
        """
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        with self._undisturbed() as again:
            parameters = {name: self._copied(p) for name, p in self._model.named_parameters() if self._double}
            before = self._loss(parameters, again)
            found = []
            for layer, error in cells:
                parameter = named[layer][1]
                missing = torch.from_numpy(error).to(parameter.device).view_as(parameter)
                name = self._names[id(parameter)]
                kept = parameters.get(name, parameter)
                group, state = groups[id(parameter)], optimizer.state.get(parameter, {})
                moved = _moved(kept, missing, summands, group, state)
                found.append(self._loss({**parameters, name: moved}, again) - before)
        return found

    def _loss(self, moved: dict[str, torch.Tensor], again: Callable[[], None]) -> float:
        again()
        buffers = {name: self._copied(buffer) for name, buffer in self._model.named_buffers()}
        replaced = {f"model.{name}": value for name, value in (buffers | moved).items()}
        loss = functional_call(self._called, replaced, ())
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"sensitivity: the loss must be a tensor of one number, got {type(loss).__name__}"
                + (f" of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else "")
            )
        return float(loss.double().item())

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        wider = self._double and tensor.is_floating_point()
        return tensor.detach().to(torch.float64, copy=True) if wider else tensor.detach().clone()

    def _widen(self, _module: Any, arguments: Any, named: Any) -> Any:
        def wide(value: Any) -> Any:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.double() if is_float else value

        return tree_map(wide, arguments), tree_map(wide, named)

    @contextmanager
    def _undisturbed(self) -> Iterator[Callable[[], None]]:
        """Restore random states and modes in the end; the value restores the random states at once."""
        devices = sorted({p.device.index for p in self._model.parameters() if p.device.type == "cuda"})
        modes = [(module, module.training) for module in self._model.modules()]
        on_host, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
        on_devices = [torch.cuda.get_rng_state(device) for device in devices]

        def again() -> None:
            torch.set_rng_state(on_host)
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002
            for device, state in zip(devices, on_devices, strict=True):
                torch.cuda.set_rng_state(state, device)
            for module, mode in modes:
                module.training = mode

        hooks = [self._model.register_forward_pre_hook(self._widen, with_kwargs=True)] if self._double else []
        try:
            yield again
        finally:
            again()
            for hook in hooks:
                hook.remove()


class _Called(torch.nn.Module):
    """Lets a functional call replace parameters under any function of the module."""

    def __init__(self, model: torch.nn.Module, loss: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self) -> Any:
        return self._loss(self.model)


def _moved(
    kept: torch.Tensor, gradient: torch.Tensor, factor: int, group: dict[str, Any], state: dict[str, Any]
) -> torch.Tensor:
    """Return where a parameter would be without a step for a multiple of this gradient, momentum included."""
    momentum, dampening = group.get("momentum") or 0.0, group.get("dampening") or 0.0
    step = factor * float(group["lr"]) * (1 - dampening if momentum else 1.0) / (1 - momentum)
    square = next((state[key] for key in _SECOND_MOMENTS if isinstance(state.get(key), torch.Tensor)), None)
    if square is not None:
        taken, betas = float(state.get("step", 0)), group.get("betas")
        corrected = square.float() / (1 - betas[1] ** taken) if betas and taken else square.float()
        gradient = gradient / (corrected.sqrt() + (group.get("eps") or 0.0))
    return torch.add(kept, gradient, alpha=-step if group.get("maximize") else step).to(kept.dtype)
