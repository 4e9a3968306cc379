"""Features beside the exchange of gradients: they import the core, and the core finds them by name at first use."""
