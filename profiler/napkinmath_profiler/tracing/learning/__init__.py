"""Learning the form of an architecture nobody wrote a family for, from its own forward on meta
tensors."""
