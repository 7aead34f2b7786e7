"""HTTP service with a web page: search an index, add and remove items.

Needs the extra ``serve``.
"""
