"""The questions to a GPU, one a file; tiny, they run on a CPU as well, to see that they run."""
