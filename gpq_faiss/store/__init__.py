"""HDF5 files: ``features.h5``, ``codes.h5``, and arrays; SQLite files: names and labels of an index. The only package that uses h5py.

A file of rows is written once and never changed. While it is being written, its columns are raw files in ``.<name>.partial/``
beside it: after ``kill -9`` an HDF5 file may be damaged, while raw columns are complete up to the last row
recorded in ``progress.json``. At the end the columns are copied into one HDF5 file.

Layout (HDF5 1.10 format, with checksums of metadata; chunks have fletcher32 checksums):

=============  ========================  ============================================================
dataset        type                      meaning
=============  ========================  ============================================================
``features``   float32 [N, M*d]          intra-normalised network output (kind ``features``)
``codes``      uint8 [N, code_size]      codes as Faiss packs them (kind ``codes``)
``ids``        int64 [N]                 item ids, returned by searches
``labels``     uint8 [N, ceil(C/8)]      multi-hot, ``np.packbits`` order, zero row unlabelled; optional
``text.NAME``  uint8 [bytes]             texts of a column (``name``: the path or key of each item), UTF-8; optional
``….ends``     int64 [N]                 where each text of ``text.NAME`` ends
``codebooks``  float32 [M, K, d]         z' of the model (eq. 1 applied to the sub-prototypes)
=============  ========================  ============================================================
"""
