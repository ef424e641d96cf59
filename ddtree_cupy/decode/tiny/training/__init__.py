"""PyTorch side of the tiny models: definitions, training loop, sampling, acceptance estimate."""
