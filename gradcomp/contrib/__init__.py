"""Features outside of the exchange of gradients: they import the core, which finds them by name at first use."""
