"""The examples of hypothesis have no time limit: how long one takes depends on what else the machine does."""

from hypothesis import settings

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
