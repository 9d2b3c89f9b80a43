"""Hypothesis draws the same examples in every run, so that a failure is the change's and not the
day's; `--hypothesis-profile=default` draws others."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
