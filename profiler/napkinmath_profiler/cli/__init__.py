"""One file a command of `estimate` that needs torch, and the oracle that prints a traced step."""
