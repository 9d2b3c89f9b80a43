"""Scripts that launch or are a training: shell lines, Python files and notebooks, read and never run."""
