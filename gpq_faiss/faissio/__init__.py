"""Faiss index files and their sidecars: safe reading, atomic writing, access in place, and export."""
