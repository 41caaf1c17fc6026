"""The MiMo-Audio tokenizer in PyTorch; knows nothing of gRPC, threads or queues."""
