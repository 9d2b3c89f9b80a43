"""The report: the only place with widths, colours and English sentences about an estimate."""
