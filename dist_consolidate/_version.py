"""The version, once: packaging reads it here, and so does the code."""

__version__ = "0.1.0"
