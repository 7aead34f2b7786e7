"""Arrays of codes: checked, packed, encoded, scored, grouped. Nothing here opens a file or searches an index."""
