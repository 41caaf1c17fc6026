"""Client of the MiMo-Audio tokenizer service."""
