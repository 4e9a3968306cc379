"""Adapters to existing engines that move the bytes. Each is imported only when asked for."""

from gradcomp.transport.base import AllGather, AllReduce, AllToAll, Exchange, Handle, Operation, Transport

__all__ = ["AllGather", "AllReduce", "AllToAll", "Exchange", "Handle", "Operation", "Transport"]
