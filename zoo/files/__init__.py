"""Weights on disk: safetensors and JSON, ours and timm's. Nothing here reads a pickle."""
