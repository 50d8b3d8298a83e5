"""The steps of a swap: what is refused, exchanged, kept tied, and the way back."""
