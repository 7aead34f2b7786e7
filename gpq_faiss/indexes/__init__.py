"""Indexes to search: in memory (:mod:`.memory`) or over a file that stays on disk (:mod:`.file`); :mod:`.opening` chooses.

- ``protocol``: what every index is; ``plan``: how one in memory is searched; ``engine``: what searches it
- ``proof``, ``single``, ``ivf``: shortlist and proof, over all codes, for one query, within lists; ``scanners``: what shortlists
- ``lists``, ``probing``, ``tune``: how lists are made, which of them a query probes, and how many it takes for a recall
- ``manifest``: the shards of one index; ``sharded``: what merges their answers
- ``items``: codes by ascending id; ``filters``; ``ranges``; ``threads``; ``best``, ``blocks``, ``budget``: of a file
"""
