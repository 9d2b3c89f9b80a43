"""Code that knows architectures: a config becomes a ModelSpec (families), whose layers record their
operations."""
