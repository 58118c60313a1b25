"""The listeners."""
