"""`python -m serve.equip`: the same bundle with another engine."""
