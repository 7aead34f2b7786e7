"""A method, a backbone, a loss and a source of data of one's own for gpq-faiss."""
