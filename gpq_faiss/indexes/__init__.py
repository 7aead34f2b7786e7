"""Search in memory and in place, exact by lists made of codewords.

- ``memory``, ``file``, ``sharded``, ``manifest``, ``opening``: the indexes, and how a file becomes one
- ``codeword_lists``: the search, by the compiled loops of ``kernels``; ``stored`` has the same over the lists of a file
- ``base``, ``items``, ``filters``, ``threads``: what they share
"""
