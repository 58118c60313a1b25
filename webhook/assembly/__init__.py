"""Builds the parts of a process from its settings."""
