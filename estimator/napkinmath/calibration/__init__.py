"""Measured speeds: files of them, this machine, and a step's time read off its measured layers."""
