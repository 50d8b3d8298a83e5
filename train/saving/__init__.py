"""Checkpoints: written whole or not at all, found, checked and taken up again."""
