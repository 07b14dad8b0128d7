"""The demonstration: one long document, one question, three ways to the first token."""
