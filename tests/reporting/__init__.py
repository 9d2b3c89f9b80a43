"""The report: what it prints, draws and writes."""
