"""The Estimate and what is read off it: verdicts, ranges, findings, changes that would help."""
