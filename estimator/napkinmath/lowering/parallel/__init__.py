"""Parallelism: how a step is spread over ranks, as rules of recording and choices over recorded
runs."""
