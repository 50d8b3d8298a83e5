"""`python -m train ...` that notes what it has seen of each step, for the soak."""

import os
import sys

from tests.end_to_end.killed_rank import note_steps
from train.__main__ import main

if __name__ == "__main__":
    note_steps(os.open(f"steps{os.environ.get('RANK', '0')}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
