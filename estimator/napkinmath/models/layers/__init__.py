"""Layer types: parts that families compose. One file a kind of layer; each records its forward as
transformers runs it."""
