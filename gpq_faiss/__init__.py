"""Generalized Product Quantization as a Faiss toolkit.

The whole path is on one page in :mod:`gpq_faiss.pipeline`; this module only names the version, so that
``import gpq_faiss`` stays free of side effects.
"""

__version__ = "0.1.0"
