"""Makes the fingerprint that ranks compare in every exchange: a parameter sample and the optimizer's settings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from gradcomp import kernels
from gradcomp.exchange.fingerprint import DeferredFingerprint, Fingerprint
from gradcomp.exchange.thread import in_background
from gradcomp.kernels.devices import Device
from gradcomp.kernels.reference_checksum import Words, sampled_elements, value_of_sample
from gradcomp.kernels.segments import DTYPE_NUMBERS, SEGMENT
from gradcomp.torch.layers import Named
from gradcomp.torch.streams import streams_of
from gradcomp.torch.tensors import Form, dtype_name


class ParameterSamples:
    """Samples parameters where they lie in memory, by one kernel call for all of them.

    On a GPU the call is made on a thread of its own, after the work that computes the parameters, and only
    the first exchange bucket waits for it. On a device without kernels, torch reads the elements, layer by
    layer.
    """

    def __init__(self, named: Named, device: Device) -> None:
        self._parameters = [parameter for _, parameter in named]
        self._forms = [Form.of(parameter) for parameter in self._parameters]
        self._device = device
        self._table = np.zeros(len(named), dtype=SEGMENT)
        self._table["dtype"] = [DTYPE_NUMBERS[dtype_name(parameter.dtype)] for parameter in self._parameters]

    def take(self, turn: int, scalars: str) -> DeferredFingerprint:
        """Return the fingerprint of exchange number ``turn``, or on a GPU a future of it."""
        addresses = np.fromiter(
            map(torch.Tensor.data_ptr, self._parameters), np.uint64, len(self._parameters)
        )
        for i in np.flatnonzero(addresses != self._table["gradient"]).tolist():
            # A parameter whose dtype, shape or device changed is not read; its gradient will be refused.
            parameter, form = self._parameters[i], self._forms[i]
            as_it_was = addresses[i] and form.fits(parameter) and parameter.stride() == form.strides
            self._table["length"][i] = parameter.numel() if as_it_was else 0
        self._table["gradient"] = addresses
        if not self._device.is_late:
            return Fingerprint(_sample(self._table, turn), scalars)
        table, streams = self._table.copy(), streams_of(self._parameters[0].device)
        begun = streams.mark()

        def work() -> Fingerprint:
            with streams.on(streams.another()):
                streams.follow(begun)
                if self._device.driver is None:
                    return Fingerprint(self._taken(table["length"].tolist(), turn), scalars)
                self._device.follow([self._device.mark(streams.handle())])
                return Fingerprint(_sample(table, turn), scalars)

        return in_background(self._device.bound(work))

    def _taken(self, lengths: list[int], turn: int) -> Words:
        """Compute the kernel's values from elements that torch reads."""
        values = np.zeros(len(lengths), dtype=np.uint32)
        for i, (length, parameter) in enumerate(zip(lengths, self._parameters, strict=True)):
            if length:
                elements = sampled_elements(length, turn & 0xFFFFFFFF)
                flat = parameter.detach().as_strided((length,), (1,))
                found = flat[torch.from_numpy(elements).to(flat.device)].cpu()
                values[i] = value_of_sample(found.view(_WORDS[found.element_size()]).numpy(), elements)
        return values


#: Size of an element in bytes -> integer dtype that NumPy has too, unlike bfloat16.
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sample(table: np.ndarray[Any, Any], turn: int) -> Words:
    values = np.zeros(len(table), dtype=np.uint32)
    kernels.sample(table, values, turn=turn & 0xFFFFFFFF)
    return values


def scalars_of(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return the numeric settings of each parameter group (rates, momentum, decay) as JSON.

    Tensors on a device are left out, because reading them would wait for the device. Settings whose name
    contains "rank" are left out too: they differ between ranks in optimizers that share work.
    """
    return json.dumps(
        [
            {
                name: number
                for name in optimizer.defaults
                if "rank" not in name and (number := _number(group.get(name))) is not None
            }
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
    )


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, tuple | list):
        return [_number(each) for each in value]
    return value if isinstance(value, float | int) else None
