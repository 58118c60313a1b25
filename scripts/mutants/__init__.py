"""Mutations of the code that the tests have to detect."""
