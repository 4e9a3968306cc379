"""Examines a process and the ranks of its job: facts, findings, measured links. ``gradcomp doctor`` prints them."""
