"""Arrays of codes: checks, packing, encoding and scoring, without files or indexes."""
