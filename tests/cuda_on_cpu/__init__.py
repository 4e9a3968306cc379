"""A GPU's stand-in: the same kernel sources, compiled for the CPU, behind the driver's interface."""
