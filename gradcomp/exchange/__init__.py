"""The exchange of a step: exchange buckets, rounds, plans, the engine thread, and what happens when a rank fails."""
