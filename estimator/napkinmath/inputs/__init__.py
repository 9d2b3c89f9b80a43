"""What a user already has, a job file of ours or of another tool, read into one mapping of options
and from there into records."""
