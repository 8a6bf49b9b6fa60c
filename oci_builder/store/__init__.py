"""Blobs on disk: nothing is visible before commit."""
