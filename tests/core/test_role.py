"""What a rank is for: those before the first trainer only serve."""

from __future__ import annotations

import pytest

from gradcomp import ConfigError
from gradcomp.core.role import Role
from gradcomp.core.scheme import parse


def roles(reduction: str, world: int) -> list[Role]:
    return [Role(rank, parse(reduction).trainers(world)) for rank in range(world)]


@pytest.mark.parametrize(
    ("reduction", "world", "first"),
    [
        ("sra", 4, 0),
        ("parameter_server:servers=2", 4, 0),
        ("parameter_server:servers=2,dedicated=true", 5, 2),
        ("parameter_server:dedicated=true", 2, 1),
        ("parameter_server:servers=2,dedicated=true", 1, 0),  # alone it trains
    ],
)
def test_ranks_from_the_first_trainer_on_train(reduction: str, world: int, first: int):
    made = roles(reduction, world)
    assert [role.trains for role in made] == [rank >= first for rank in range(world)]
    assert [role.rank for role in made if role.leads] == [first]
    assert {(role.world, role.first, role.all_train) for role in made} == {(world, first, first == 0)}
    # Trainers draw as if there were no other ranks, and no two ranks alike.
    assert [role.number for role in made] == [*range(world - first, world), *range(world - first)]


def test_only_beside_servers_is_there_something_to_say_and_to_refuse():
    (alone, *_), (beside, *_) = roles("sra", 3), roles("parameter_server:servers=2,dedicated=true", 3)
    assert (alone.remark, beside.remark) == ("", "the first 2 of 3 ranks only serve")
    alone.needs_all("gc.save")
    setting = r"\(reduction=parameter_server:servers=2,dedicated=true\)"
    with pytest.raises(ConfigError, match=f"gc.save does not work with dedicated servers {setting}"):
        beside.needs_all("gc.save")
