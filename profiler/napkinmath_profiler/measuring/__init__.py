"""Real training steps with real tensors: built from a config, run on a GPU or a CPU, timed and
attributed."""
