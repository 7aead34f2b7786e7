"""Faiss index files and their sidecars: read with care, written whole, in place, and for other tools."""
