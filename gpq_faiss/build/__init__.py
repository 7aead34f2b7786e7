"""Building of index files from codes: sources and streaming builds."""
