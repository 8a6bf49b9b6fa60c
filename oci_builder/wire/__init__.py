"""Byte formats. Stream in, stream out."""
