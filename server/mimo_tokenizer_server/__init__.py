"""The server that owns the MiMo-Audio tokenizer's weights, and the command `mimo-tokenizer`."""
