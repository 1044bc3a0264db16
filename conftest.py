"""Collects the Markdown pages, so that `pytest README.md docs` runs their code."""

import torch

from tests.pages import Page

torch.set_num_threads(1)


def pytest_collect_file(file_path, parent):
    """Return the page when the file is one; its Python blocks are one test."""
    return Page.from_parent(parent, path=file_path) if file_path.suffix == ".md" else None
