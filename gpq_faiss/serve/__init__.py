"""A service over HTTP and a page: search an index, add and remove items. Needs the extra ``serve``."""
