"""How the plain model is lowered under a training configuration, down to the backward pass."""
