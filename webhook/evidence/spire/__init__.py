"""SPIRE Server, asked about its agents."""
