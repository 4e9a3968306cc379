"""The job: its ranks, their rendezvous, their collectives and their checkpoints. It imports no framework."""
