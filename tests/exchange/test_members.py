"""How messages name the members of a communicator."""

from __future__ import annotations

from gradcomp.exchange.members import Roster


def test_a_message_names_the_first_of_many_ranks_and_counts_the_others():
    roster = Roster.of_size(300)
    assert roster.names([3, 4]) == "rank 3, rank 4"
    assert roster.names(range(16)) == ", ".join(f"rank {rank}" for rank in range(16))
    assert roster.names(range(2, 300)).endswith("rank 16, rank 17 and 282 more")
