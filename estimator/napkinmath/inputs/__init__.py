"""What a user already has (options, a job file of ours or of another tool), read into records."""
