"""The room of Faiss: codebooks injected and checked, index files, building, searching, GPU.

Nothing here needs torch to build or search on the CPU. One file a concern, lowest first: ``checks``, ``nearest``, ``codebooks``
(arrays), ``layout`` (what a Faiss index holds, verified), ``io`` (files), ``build`` (stages), ``search`` and ``gpu``.
"""
