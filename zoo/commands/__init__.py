"""What `python -m zoo` shows and how it is asked."""
