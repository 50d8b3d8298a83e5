"""From requests to batches: bounded, by size and by time."""
