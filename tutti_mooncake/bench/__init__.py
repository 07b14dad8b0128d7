"""Benchmarks: each verifies what it read, runs interleaved with its baseline and peers, and says where, how often and how spread."""
