"""Edges to inference engines: one sub-package per engine, none of which is imported unless that engine loads it."""
