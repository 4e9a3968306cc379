"""Quantisers code every value in few bits: casts, uniform quantisers, codebooks."""
