"""One node among others: where its engines get blocks that they don't have (docs/remote.md)."""
