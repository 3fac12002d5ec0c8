"""Results one can trust: file formats, index, manifest and atomic publishing."""
