"""Exact search of product codes, in memory or over a mapped file.

- ``opening``: opening of files and Faiss indexes
- ``index``: the index, its filters and its changes
- ``lists``: inverted lists over arrays; ``list_kernels`` and ``block_scan`` have the compiled loops
- ``list_file``: the file of these arrays, which is mapped
"""
