"""Published measurements of training memory and speed, re-estimated row by row."""
