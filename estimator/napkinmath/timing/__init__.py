"""Seconds: what kernels, collectives and schedules take on a machine."""
