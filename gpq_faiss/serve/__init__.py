"""HTTP service with a web page, which searches an index, and adds and removes items.

Needs the extra ``serve``.
"""
