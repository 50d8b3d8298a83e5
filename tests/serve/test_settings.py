import pytest
from pydantic import ValidationError

from serve.settings import GROUPS, Settings


def test_every_setting_is_explained_and_in_one_group() -> None:
    assert [name for names in GROUPS.values() for name in names] == list(Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())
    assert "" not in GROUPS


def test_defaults_are_valid_and_an_empty_variable_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: field.default for name, field in Settings.model_fields.items()}
    assert Settings(**given) == Settings()
    for name in Settings.model_fields:
        monkeypatch.setenv(f"SERVE_{name.upper()}", "")
    assert Settings() == Settings(**given)


def test_settings_cannot_change_and_know_no_others() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="prot"):
        Settings(prot=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("text", ["10.0.0.0/8", "192.168.1.1", "fd00::/8", "10.0.0.1, ::1"])
def test_trusted_proxies_are_addresses_or_networks(text: str) -> None:
    assert Settings(trusted_proxies=text).trusted_proxies == tuple(text.split(", "))  # type: ignore[arg-type]
