"""Compression for models that FSDP2 has sharded: quantised weights and gradients (QSDP)."""

from gradcomp.torch.sharded.compress import ShardedCompression, compress_fsdp

__all__ = ["ShardedCompression", "compress_fsdp"]
