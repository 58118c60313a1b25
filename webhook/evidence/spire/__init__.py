"""SPIRE Server as a source of evidence."""
