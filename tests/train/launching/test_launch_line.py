import pytest

from train.launching.launch_line import LaunchLine, read_launch_line


@pytest.mark.parametrize(
    "command",
    [
        "accelerate launch",
        "/usr/bin/python3 /usr/bin/accelerate launch",
        "python3.11 -u -m accelerate.commands.launch",
        "python -m accelerate launch",
        "python -m accelerate.commands.accelerate_cli launch",
        "/usr/bin/accelerate-launch",
    ],
)
def test_every_way_to_launch_is_read(command) -> None:
    line = read_launch_line(
        [*command.split(), "--multi_gpu", "--num_processes", "3", "-m", "train", "--resume", "auto"]
    )
    assert line == LaunchLine(3, "-m train ...")


def test_number_in_the_config_file_is_read_and_the_line_overrides_it(tmp_path) -> None:
    config = tmp_path / "accelerate.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 4\n")
    command = ["accelerate", "launch", "--config_file", str(config)]
    assert read_launch_line([*command, "script.py"]) == LaunchLine(4, "script.py ...")
    assert read_launch_line([*command, "--num_processes", "2", "script.py"]) == LaunchLine(2, "script.py ...")


@pytest.mark.parametrize("command", ["", "bash", "torchrun --nproc-per-node 2 -m train", "python -m pytest"])
def test_other_commands_are_no_launch(command) -> None:
    assert read_launch_line(command.split()) is None
