"""Files that the stages exchange: rows in HDF5, and names and changes of an index in SQLite."""
