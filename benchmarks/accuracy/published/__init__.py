"""Published measurements of training memory and speed, re-estimated row by row."""

from published.stacks import add_to_catalog

add_to_catalog()
