"""Who is in the cluster, and which blocks each node holds (docs/directory.md)."""
