"""Transports adapt existing engines that move the bytes; each is imported only when a program chooses it."""

from gradcomp.transport.base import AllGather, AllReduce, AllToAll, Exchange, Handle, Operation, Transport

__all__ = ["AllGather", "AllReduce", "AllToAll", "Exchange", "Handle", "Operation", "Transport"]
