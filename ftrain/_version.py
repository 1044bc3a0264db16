"""The version of the package, which needs no installation to be read."""

__version__ = "0.1.0"
