"""What ends a run that has gone wrong: seen by every rank, told once, with the first cause on top."""
