"""GPU search and ranking; imported only when a device is requested."""
