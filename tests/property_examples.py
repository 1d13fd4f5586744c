"""How many examples a property test looks at: its own number, and as many times more as the profile looks further than the default one."""

from __future__ import annotations

from hypothesis import settings

_OF_DEFAULT_PROFILE = 60


def examples(number: int) -> settings:
    """For a test that wants another number than the default profile's 60. Evaluated once the profile is loaded."""
    return settings(max_examples=number * settings().max_examples // _OF_DEFAULT_PROFILE)
