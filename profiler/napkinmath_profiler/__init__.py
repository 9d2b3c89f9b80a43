"""Measure and trace training steps; torch lives here and not in ``napkinmath``."""
