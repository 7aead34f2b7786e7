"""A method and a backbone of one's own for gpq-faiss."""
