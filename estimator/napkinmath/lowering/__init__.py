"""How the plain model is lowered under a training configuration: precision, quantization, adapters,
and the backward pass."""
