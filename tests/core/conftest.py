"""How much the generated tests look at, and that a busy machine does not fail them."""

from hypothesis import settings

settings.register_profile("core", deadline=None)
settings.load_profile("core")
