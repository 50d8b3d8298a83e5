"""What a run can be told: one section for each concern. A field's docstring is its help text on the command line.

Build a config with `train.load`; code that has values already uses `TrainConfig.model_validate_json`, since the
strict Python mode takes neither a list for a tuple nor text for a path.
"""

from pathlib import Path

from pydantic import field_validator

from train.fields import Groups, Section, Seed, Text, Texts
from train.sections.data import AugmentConfig, DataConfig
from train.sections.learning import LoopConfig, OptimizerConfig, ScheduleConfig
from train.sections.model import ModelConfig
from train.sections.registry import PublishConfig, TrackingConfig
from train.sections.running import CheckpointConfig, EvaluateConfig, LogConfig, WatchConfig

__all__ = [
    "AugmentConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvaluateConfig",
    "LogConfig",
    "LoopConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PublishConfig",
    "ScheduleConfig",
    "TrackingConfig",
    "TrainConfig",
    "WatchConfig",
]


class TrainConfig(Section):
    """A whole run."""

    name: Text
    """Name of the registered model, and of the run's folder in `output_dir`."""
    seed: Seed = 0
    """Seed of weights, order of the images, augmentation and dropout."""
    output_dir: Path = Path("runs")
    """Folder for runs; this one writes to OUTPUT_DIR/NAME."""
    resume: Text | None = None
    """auto: go on from the newest whole checkpoint of OUTPUT_DIR/NAME, if there is one. A path: from that one."""
    tie: Groups = ()
    """Parameters that are to be one tensor, a text or a list of names for each tie: 'a.weight = b.weight', or a glob
    over all of them, as blocks.*.attn.qkv.to_q. The first one's values stay."""
    freeze: Texts = ()
    """What does not learn: names, paths, globs, blocks by number (from 0, both ends in), as in
    [patch_embed, blocks.0-5, '*.attn.*'], or 'all but head'. Norms frozen whole keep their running statistics."""
    model: ModelConfig
    data: DataConfig
    augment: AugmentConfig = AugmentConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loop: LoopConfig = LoopConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watch: WatchConfig = WatchConfig()
    log: LogConfig = LogConfig()
    tracking: TrackingConfig = TrackingConfig()
    publish: PublishConfig = PublishConfig()

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        wrong = [c for c in "/:\\" if c in name]
        if wrong:
            raise ValueError(f"got {name!r}, but a registered model's name has no {' '.join(wrong)}")
        if name.startswith(".") or name != name.strip() or not name.isprintable() or len(name.encode()) > 200:
            raise ValueError(
                f"got {name!r}, wanted at most 200 bytes of printable text that starts with no dot or space"
            )
        return name

    @property
    def run_dir(self) -> Path:
        """The folder of this run: checkpoints, bundle, logs."""
        return self.output_dir / self.name
