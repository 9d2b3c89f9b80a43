"""What the training example is made of: its text, model, loop and report."""
