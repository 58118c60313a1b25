"""Hypothesis settings: the number of examples, and no deadline, so that a busy machine does not fail tests."""

from hypothesis import settings

settings.register_profile("core", deadline=None)
settings.load_profile("core")
