"""The room of Faiss: codebooks injected and checked, index files, engines, building, GPU.

Nothing here needs torch to build or search on the CPU. One file a concern, lowest first:

- arrays: ``checks``, ``nearest``, ``codebooks``; ``packing`` (out of FastScan's blocks)
- what a Faiss index holds, verified: ``layout``; files: ``io``, ``rowfile`` (rows of files in place)
- searching: ``keys`` (scores that sort with their positions), ``scanners`` (Faiss' scans), ``proof`` (nominate and
  prove), ``ranges``, ``items`` (ids, distinct codes), ``filters``, ``ivf``, ``engine``, ``tune``,
  ``opening``, ``disk`` (in place), ``search`` (one index, one call)
- on GPUs: ``gpu`` (forms, and the way there); with torch ``gpu_arrays``, ``gpu_torch``, ``gpu_proof``, ``gpu_lists``,
  ``gpu_search``
- one form into another: ``forms``
- building: ``shards``, ``stream``, ``build``
"""
