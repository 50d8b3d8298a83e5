"""One rank of `run_ranks`: load a function from a test file, call it with an Accelerator, write what came of it."""

import importlib.util
import json
import sys
import traceback
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator


def main(job: dict) -> None:
    spec = importlib.util.spec_from_file_location("rank_worker_job", job["file"])
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if job["world_size"] > 1:  # a file instead of a port: nothing to race for
        dist.init_process_group(
            "gloo", init_method=f"file://{job['store']}", rank=job["rank"], world_size=job["world_size"]
        )
    accelerator = Accelerator(cpu=True)
    try:
        outcome = {"value": getattr(module, job["function"])(accelerator, **job["arguments"])}
    except Exception as error:  # the parent's test looks at it
        outcome = {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
    Path(job["outcome"]).write_text(json.dumps(outcome), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
