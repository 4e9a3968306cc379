"""What the first trainer tells those who only serve, and what they do not believe."""

from __future__ import annotations

import numpy as np
import pytest

from gradcomp import StateError, TransportError, WireFormatError
from gradcomp.core.role import Role
from gradcomp.engine.cues import DONE, STEP, Cues
from gradcomp.transport.base import Handle
from gradcomp.transport.inprocess import World

SERVERS, WORLD = 2, 5


def issued(cue: int, step: int, tamper=None) -> tuple[list[Cues], list[Handle]]:
    """All ranks have issued their part of one cue."""
    world = World(WORLD, tamper=tamper)
    cues = [
        Cues(transport, Role(rank, range(SERVERS, WORLD)))
        for rank, transport in enumerate(world.transports())
    ]
    give = Cues.begin_step if cue == STEP else Cues.dismiss
    return cues, [one.listen() if rank < SERVERS else give(one, step) for rank, one in enumerate(cues)]


def told(cue: int, step: int, tamper=None) -> list[Cues]:
    """All ranks have issued their part of one cue, and it has come."""
    cues, handles = issued(cue, step, tamper)
    assert all(handle.poll() for handle in handles)
    return cues


@pytest.mark.parametrize("cue", [STEP, DONE])
@pytest.mark.parametrize("step", [0, 7, 2**32 + 5])
def test_every_server_hears_what_the_first_trainer_says(cue: int, step: int):
    sent = []
    cues = told(cue, step, lambda source, to, word: (sent.append((source, to, len(word))), word)[1])
    assert [one.heard(step) for one in cues[:SERVERS]] == [cue == STEP] * SERVERS
    assert sent == [(SERVERS, 0, 8), (SERVERS, 1, 8)]
    assert [one._transport.bytes_sent for one in cues] == [0, 0, 16, 0, 0]


@pytest.mark.parametrize("byte", range(8))
def test_a_cue_that_is_none_is_refused(byte: int):
    def change(source: int, to: int, word: np.ndarray) -> np.ndarray:
        word[byte] ^= 0x10
        return word

    cues = told(STEP, 3, change)
    for one in cues[:SERVERS]:
        with pytest.raises(WireFormatError, match=r"rank 2 sent .* as the cue to step 3"):
            one.heard(3)


def test_a_cue_to_another_step_is_refused():
    cues = told(STEP, 4)
    with pytest.raises(WireFormatError, match="as the cue to step 5"):
        cues[0].heard(5)


def test_a_cue_of_another_length_does_not_arrive():
    _, handles = issued(STEP, 0, lambda source, to, word: word[:-1])
    for handle in handles:
        with pytest.raises(TransportError, match="sent 7 bytes"):
            handle.poll()


def test_a_server_opens_one_step_for_a_cue():
    server = told(STEP, 4)[0]
    for _ in range(2):
        with pytest.raises(StateError, match="only serves"):
            server.begin_step(4)
        assert server.heard(4)
        assert server.begin_step(4) is None


def test_where_all_train_nothing_is_said():
    for rank, transport in enumerate(World(2).transports()):
        one = Cues(transport, Role(rank, range(2)))
        assert one.begin_step(0) is one.dismiss(1) is None
        assert one.part(1, lambda *_: pytest.fail("it waits for nobody"))
        assert transport.bytes_sent == 0
