"""What users hold: an index in memory or over a file. Nothing here needs torch.

- ``protocol``: what every index is; ``opening``: the one that suits a file; ``memory`` and ``file``: the two there are
- ``proof``: shortlists and exact scores; ``scanners``: Faiss' scans and how far they are off; ``single``: one query
- ``ivf``: lists in memory; ``lists``: how they are made; ``probing``: which of them a query looks at; ``tune``: how many
- ``items``: codes by ascending id; ``filters``; ``ranges``; ``threads``; ``kinds``: the names of ways to search
"""
