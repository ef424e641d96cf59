"""Training of the tiny models, in PyTorch: text, definitions, loop, sampling, acceptance estimate; not in the wheel."""
