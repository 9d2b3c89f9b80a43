"""Measure a device: its ceilings, the curves of its operations, and one to three real layers of a
model; keep it as a calibration file."""
