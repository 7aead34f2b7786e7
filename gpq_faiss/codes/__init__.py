"""Arrays of codes: checks, packing, encoding, scoring; without files or indexes."""
