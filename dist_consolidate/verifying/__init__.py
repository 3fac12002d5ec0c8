"""Verifying a result: against its manifest, and bit for bit against the checkpoint."""
