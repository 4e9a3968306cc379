"""Compresses gradients in other libraries' trainers, and logs to their loggers. Import the module that you use."""
