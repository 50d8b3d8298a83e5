import logging
import os
import re
from collections.abc import Iterator

import pytest

from serve.command_line import read_settings, warn_of_unknown
from serve.errors import SettingsError
from serve.settings import GROUPS, Settings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in [name for name in os.environ if name.startswith("SERVE_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_command_line_wins_over_the_environment_over_the_defaults(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("SERVE_PORT", "9000")
    environment.setenv("SERVE_MAX_PIXELS", "77")
    settings = read_settings(["some/bundle", "--port", "9001"])
    assert (settings.model_uri, settings.port, settings.max_pixels) == (("some/bundle",), 9001, 77)
    assert settings.host == "127.0.0.1"
    assert read_settings([]).model_uri == ("models:/digits@champion",)


def test_several_models_are_words_on_the_line_and_commas_in_the_variable(environment: pytest.MonkeyPatch) -> None:
    assert read_settings(["a", "models:/b@c"]).model_uri == ("a", "models:/b@c")
    environment.setenv("SERVE_MODEL_URI", "a, models:/b/1,")
    assert read_settings([]).model_uri == ("a", "models:/b/1")


@pytest.mark.parametrize(
    ("variable", "argv", "plugins"),
    [
        ("", [], ()),
        ("a.py", [], ("a.py",)),
        (f"/x/a.py{os.pathsep}b.py,my_package.attention", [], ("/x/a.py", "b.py", "my_package.attention")),
        ("a.py", ["--plugins", "b.py"], ("b.py",)),
        ("", ["--plugins", "a.py,b.py", "--plugins", "c.py"], ("a.py", "b.py", "c.py")),
    ],
)
def test_plugins_come_from_the_environment_or_the_line(
    environment: pytest.MonkeyPatch, variable: str, argv: list[str], plugins: tuple[str, ...]
) -> None:
    environment.setenv("SERVE_PLUGINS", variable)
    assert read_settings(argv).plugins == plugins


@pytest.mark.parametrize(
    ("variable", "argv", "pin"),
    [
        ("", [], False),
        ("true", [], True),
        ("1", [], True),
        ("", ["--pin"], True),
        ("true", ["--no-pin"], False),
    ],
)
def test_a_boolean_is_a_plain_flag(
    environment: pytest.MonkeyPatch, variable: str, argv: list[str], *, pin: bool
) -> None:
    environment.setenv("SERVE_PIN", variable)
    assert read_settings(argv).pin is pin
    assert read_settings(["--no-access-log"]).access_log is False


@pytest.mark.parametrize(
    ("variables", "argv", "message"),
    [
        ({}, ["--port", "70000"], r"--port: got '70000', input should be less than or equal to 65535"),
        ({"SERVE_PORT": "70000"}, [], r"SERVE_PORT: got '70000', input should be less than or equal to 65535"),
        ({"SERVE_PIN": "perhaps"}, [], r"SERVE_PIN: got 'perhaps', input should be a valid boolean, .*"),
        ({}, ["--max-pixels", "many"], r"--max-pixels: got 'many', input should be a valid integer, .*"),
        ({}, ["--head-timeout-s", "inf"], r"--head-timeout-s: got 'inf', input should be .*"),
        ({}, ["--engine", "tensorrt"], r"--engine: got 'tensorrt', input should be 'card', 'eager', .*"),
        (
            {},
            ["--rate-limit", "5/fortnight"],
            r"--rate-limit: got '5/fortnight', wanted a number and a period, such as 100/second",
        ),
        ({}, ["--rate-limit", "0/second"], r"--rate-limit: got '0/second', wanted a number and a period, .*"),
        ({}, ["--device", "tpu"], r"--device: got 'tpu', wanted auto, cpu, cuda or cuda:1"),
        ({}, [""], r"MODEL_URI: got \[''\], wanted one model or more, such as models:/digits@champion or .*"),
        ({"SERVE_MODEL_URI": ","}, [], r"SERVE_MODEL_URI: got ',', wanted one model or more, .*"),
        ({}, ["--trusted-proxies", "*"], r"--trusted-proxies: got \['\*'\], '\*' does not appear to be .*"),
        ({}, ["--trusted-proxies", "10.0.0.1/8"], r"--trusted-proxies: .*10.0.0.1/8 has host bits set"),
        ({}, ["--prot", "80"], r"unknown flag --prot, did you mean '--port'.*"),
        ({}, ["--port=80", "--api_keys_file=x"], r"unknown flag --api_keys_file, did you mean '--api-keys-file'.*"),
        ({}, ["--port"], r"argument --port: expected one argument"),
        ({}, ["--port", "x", "--max-batch", "0"], r"--max-batch: got '0', .*; --port: got 'x', .*"),
        (
            {"SERVE_PORT": "tcp://10.0.0.7:80"},
            [],
            r'SERVE_PORT: got \'tcp://.*; Kubernetes sets it for a Service called "serve": say enableServiceLinks: '
            "false .*",
        ),
    ],
)
def test_a_mistake_names_its_flag_or_variable(
    environment: pytest.MonkeyPatch, variables: dict[str, str], argv: list[str], message: str
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises(SettingsError) as raised:
        read_settings(argv)
    assert re.fullmatch(message, str(raised.value)), str(raised.value)


def test_a_flag_saves_from_what_kubernetes_sets(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("SERVE_PORT", "tcp://10.0.0.7:80")
    assert read_settings(["--port", "80"]).port == 80


def test_a_variable_that_is_no_setting_is_told_with_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    kubernetes = ["SERVE_SERVICE_HOST", "SERVE_SERVICE_PORT_HTTP", "SERVE_PORT_80_TCP", "SERVE_PORT_80_TCP_ADDR"]
    with caplog.at_level(logging.WARNING):
        warn_of_unknown(dict.fromkeys([*kubernetes, "SERVE_PORT", "serve_host", "OTHER"], "x"))
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        warn_of_unknown({"SERVE_API_KEY_FILE": "SECRET"})
    assert caplog.messages == ["SERVE_API_KEY_FILE is no setting and is not read, did you mean SERVE_API_KEYS_FILE?"]


def test_help_explains_every_setting_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        read_settings(["--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in Settings.model_fields.items():
        flag = "MODEL_URI" if name == "model_uri" else f"--{name.replace('_', '-')}"
        assert f" {flag} " in text or f" {flag}, --no-" in text, flag
        assert " ".join(str(field.description).split()) in text, flag
    for title in GROUPS:
        assert f" {title}: " in text
    assert "SERVE_PORT=8080" in text
