"""Distributed training of zoo models: config, data, replica check, loop, checkpoints, tracking, publishing."""
