"""Files beside and between the stages: rows in HDF5, and names and changes of an index in SQLite."""
