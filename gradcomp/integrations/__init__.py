"""Compresses gradients in other libraries' trainers. Each module imports its library: import the one that you use."""
