"""What an inference engine holds of a model, alone or beside a training: its weights, the pages of
its cache, its graphs."""
