"""What a bucket asks of a device: calls, copies and waits, and at which addresses kernels find payloads."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from gradcomp import Filter, LayerSpec, Policy, Quantize
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.segments import SEGMENT
from gradcomp.testing.simulation import Simulation

LAYERS = [
    LayerSpec("a.weight", (96, 64), "float32", "weight"),
    LayerSpec("a.bias", (96,), "float32", "bias"),
    LayerSpec("b.weight", (64, 80), "float32", "weight"),
    LayerSpec("b.bias", (80,), "float32", "bias"),
]

#: Matrices in four bits, biases exactly: two codecs in one message.
MIXED = Policy(Quantize(4, bucket_size=64), filter=Filter(min_elements=0))


def ranks_of(gpu: Any, world: int) -> Simulation:
    return Simulation(LAYERS, MIXED, world, devices=[gpu] + [HOST] * (world - 1), slice_elements=1 << 20)


def test_a_bucket_waits_once_in_a_phase_though_its_parts_have_codecs_of_their_own(gpu: Any) -> None:
    ranks = ranks_of(gpu, 2)
    (bucket,) = ranks.pipelines[0].layout.buckets
    assert len(bucket.groups) == 2
    ranks.step()
    before = gpu.driver.waited, gpu.driver.synchronized
    ranks.step()
    # Encode, mean, decode.
    assert gpu.driver.waited - before[0] == 3
    assert gpu.driver.synchronized == before[1]


@pytest.mark.parametrize("feedback", [False, True])
def test_codes_in_messages_of_the_host_are_added_by_the_device(feedback: bool, gpu: Any) -> None:
    """An owner's table has no address without feedback: the device is known all the same."""
    layers = [LayerSpec(f"{i}.weight", (24, 40), "float32", "weight") for i in range(8)]
    compressor = Quantize(4, bucket_size=64, feedback=feedback)
    ranks = Simulation(layers, compressor, 2, devices=[gpu, HOST], slice_elements=24 * 40)
    assert len(ranks.pipelines[0].layout.buckets) == 8
    ranks.step()
    before, launched = gpu.driver.waited, len(gpu.driver.launched)
    ranks.step()
    assert gpu.driver.waited - before == 24
    names = [name for name, _ in gpu.driver.launched[launched:]]
    assert sum(name.startswith("reduce_") for name in names) == 8


def test_what_is_encoded_is_not_copied_up_before(gpu: Any) -> None:
    """Messages have headers between their payloads, which stay as they are all the same."""
    ranks = ranks_of(gpu, 3)
    copies = Copies(gpu.driver)
    ranks.step()
    (bucket,) = ranks.pipelines[0].layout.buckets
    tables = 2 * sum(len(group.table) + 2 for group in bucket.groups)
    encode, _, decode = (size for _, size in copies.up)
    assert decode - encode > bucket.payload_bytes - 256 * tables


@pytest.mark.parametrize("world", [2, 3])
def test_kernels_find_chunks_where_vectors_can_be_loaded(world: int, gpu: Any) -> None:
    """The first payload of a message at a multiple of 16 bytes, all of them at multiples of 4, as eight codes take."""
    ranks = ranks_of(gpu, world)
    driver = gpu.driver
    seen: dict[str, list[int]] = {}
    launch = driver.launch

    def looked_at(function: Any, blocks: int, threads: int, argument: Any) -> None:
        name = function[-1]
        if name == "decode" or name.startswith("encode_"):
            rows, places, tiles, payload = argument.view(np.uint64)[:4].tolist()
            count = (ctypes.c_uint32 * (2 * tiles)).from_address(places)[2 * tiles - 2] + 1
            table = np.frombuffer((ctypes.c_char * (SEGMENT.itemsize * count)).from_address(rows), SEGMENT)
            seen.setdefault(name, []).extend(
                (np.uint64(payload) + table["payload"].astype(np.uint64)).tolist()
            )
        launch(function, blocks, threads, argument)

    driver.launch = looked_at
    ranks.step()
    assert all(address % 4 == 0 for addresses in seen.values() for address in addresses)
    for name in ("encode_stochastic", "decode"):  # layers that travel exactly lie behind those
        assert sum(address % 16 == 0 for address in seen[name]) >= world


@pytest.mark.parametrize("reduction", ["sra", "all_to_all"])
def test_payloads_are_copied_from_messages_and_into_them_by_the_device(reduction: str, gpu: Any) -> None:
    """What the transport sends and receives is what the device copies: nothing is copied in between."""
    layers = [LayerSpec("weight", (512, 1024), "float32", "weight")]
    settings: dict[str, Any] = {"slice_elements": 1 << 20, "reduction": reduction}
    ranks = Simulation(layers, Quantize(4), 2, devices=[gpu, HOST], **settings)
    alone = Simulation(layers, Quantize(4), 2, **settings)
    (bucket,) = ranks.pipelines[0].layout.buckets
    gradients = ranks.gradients()
    ranks.step(gradients)
    alone.step(gradients)
    copies, driver = Copies(gpu.driver), gpu.driver
    moved = messages_of(ranks.pipelines[0].transport)
    waited = driver.waited
    found, expected = ranks.step(gradients), alone.step(gradients)
    assert found.mean(0).tobytes() == expected.mean(0).tobytes()
    # In halves. Up: two of a sum, both of the mean; or two wholes of a sum, which stays there. Down: what is encoded,
    # and the mean of one half.
    up, down = (4, 3) if reduction == "sra" else (4, 2)
    for copied, halves in ((copies.up, up), (copies.down, down)):
        in_messages = [
            size for at, size in copied if any(begin <= at < begin + nbytes for begin, nbytes in moved)
        ]
        assert sum(in_messages) >= halves * bucket.payload_bytes // 2
        assert sum(size for _, size in copied) - sum(in_messages) < bucket.payload_bytes // 4
    assert driver.waited - waited == 3


class Copies:
    """Host addresses and sizes of what a device copies from now on."""

    def __init__(self, driver: Any) -> None:
        self.up: list[tuple[int, int]] = []
        self.down: list[tuple[int, int]] = []
        upload, download = driver.upload, driver.download
        driver.upload = lambda address, source: (
            self.up.append((source.ctypes.data, source.nbytes)),
            upload(address, source),
        )
        driver.download = lambda target, address: (
            self.down.append((target.ctypes.data, target.nbytes)),
            download(target, address),
        )


def messages_of(transport: Any) -> list[tuple[int, int]]:
    """Addresses and sizes of all that the transport is given from now on."""
    given: list[tuple[int, int]] = []
    for name in ("alltoallv", "allgatherv"):
        call = getattr(transport, name)

        def noted(*arguments: Any, call: Any = call) -> Any:
            given.extend(
                (each.ctypes.data, each.nbytes) for each in arguments if isinstance(each, np.ndarray)
            )
            return call(*arguments)

        setattr(transport, name, noted)
    return given
