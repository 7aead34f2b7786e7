"""Exact search of product codes, in memory or over a mapped file.

- ``opening``: how a file becomes an index
- ``index``: the index, its filters and its changes
- ``lists``: inverted lists over arrays; ``list_kernels`` and ``block_scan`` have the compiled loops
- ``list_file``: the arrays in a file that is mapped
"""
