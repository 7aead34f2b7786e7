"""Everything that needs a device; imported only where a device is requested."""
