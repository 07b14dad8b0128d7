"""Blocks from another node: what serves them there, and what fetches them here (docs/remote.md)."""
