"""Drafters of the embedded pair: how they are trained, shipped, and rebuilt on a user's machine.

    prompts.py   training prompts, made by a program
    target.py    the target as plain PyTorch: hidden states for training, a fast sampler's decode step
    sample.py    responses sampled from the target, continuously batched
    corpus.py    the sampled sequences, on disk and as batches
    eagle3.py    the EAGLE-3 head
    small.py     the stand-alone draft model
    losses.py    distillation loss, fused with the output layer
    train.py     the training loops and their validation
    weights.py   the shipped form: 8-bit rows, hashes
    install.py   shipped weights + target -> a checkpoint that vLLM loads

Importing this package needs no torch.
"""
