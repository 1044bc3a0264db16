"""The cases for a GPU, one per file; with ``--gpu-set --tiny`` they run on a CPU as well, as a test."""
