"""Arrays of codes: checks, packing, encoding, scoring, grouping; without files or indexes."""
