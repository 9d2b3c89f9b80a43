"""Data parallelism: who stores which part of parameters, gradients and states, and what is gathered
and reduced when."""
