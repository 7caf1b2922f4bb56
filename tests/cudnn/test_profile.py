"""Device profiles: what a bad one is told, and that cuDNN asks for what we ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ucudnn.backends.cudnn.profile import NEWER_FIELDS, REQUIRED_FIELDS, DeviceProfile
from ucudnn.errors import ConfigError

H200 = Path(__file__).parents[2] / "benchmarks" / "devices" / "h200.json"
FIELDS = json.loads(H200.read_text())


def test_a_profile_of_the_package_is_named_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert DeviceProfile.load("h200").text == H200.read_text()
    with pytest.raises(ConfigError, match="cannot read .* h100: .* that ucudnn has: h200"):
        DeviceProfile.load("h100")
    # A file of the user goes before it.
    (tmp_path / "h200").write_text(json.dumps({**FIELDS, "deviceName": "mine"}))
    assert DeviceProfile.load("h200").name == "mine"


@pytest.mark.parametrize(
    ("number", "text"), [(900, "9.0"), (860, "8.6"), (1000, "10.0"), (1210, "12.1")]
)
def test_architectures_have_two_numbers(number, text):
    found = DeviceProfile.parse(json.dumps({**FIELDS, "deviceVer": number}), "here")
    assert found.compute_capability == text


@pytest.mark.parametrize("name", REQUIRED_FIELDS)
def test_a_missing_field_is_named(name):
    rest = {other: value for other, value in FIELDS.items() if other != name}
    with pytest.raises(ConfigError, match=rf"h200\.json: .*`{name}`; .*save-device-profile"):
        DeviceProfile.parse(json.dumps(rest), "h200.json")


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("multiProcessorCount", "132", "Expected `int`, got `str`"),
        ("multiProcessorCount", -1, "Expected `int` >= 0"),
        ("multiProcessorCount", 1.5, "Expected `int`, got `float`"),
        ("multiProcessorCount", True, "Expected `int`, got `bool`"),
        ("maxGridSize", [1, 2], "Expected `array` of length 3, got 2"),
        ("deviceName", 7, "Expected `str`, got `int`"),
    ],
)
def test_a_wrong_value_is_named_with_the_rule(name, value, rule):
    with pytest.raises(ConfigError, match=rf"bad\.json: {rule} - at `[$].{name}`"):
        DeviceProfile.parse(json.dumps({**FIELDS, name: value}), "bad.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"x"'])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(ConfigError, match="device profile bad.json"):
        DeviceProfile.parse(text, "bad.json")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name in ("none.json", "binary.json", "."):
        with pytest.raises(ConfigError, match="cannot read the device profile"):
            DeviceProfile.load(tmp_path / name)


def test_what_is_saved_is_what_is_read(tmp_path):
    profile = DeviceProfile.load(H200)
    profile.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == FIELDS
    with pytest.raises(ConfigError, match="cannot write the device profile"):
        profile.save(tmp_path / "nowhere" / "again.json")


def test_cudnn_requires_the_same_fields(inside):
    required = set(inside("fields_that_cudnn_requires"))
    assert required - set(NEWER_FIELDS) == set(REQUIRED_FIELDS)


def test_a_field_that_a_newer_cudnn_requires_is_named(newest):
    required = [name for name in newest("fields_that_cudnn_requires") if name in NEWER_FIELDS]
    if not required:
        pytest.skip("this cuDNN requires no newer field")
    for name in required:
        kind, message = newest("refused_profile", changes={name: None})
        assert kind == "ConfigError"
        assert f"asks for what the device profile changed.json lacks: {name};" in message


def test_an_unknown_architecture_is_refused_in_a_sentence(inside):
    kind, message = inside("refused_profile", changes={"deviceVer": 350, "deviceName": "Old"})
    assert kind == "UnsupportedError"
    assert "changed.json (Old, compute capability 3.5)" in message


def test_another_architecture_has_other_engines(inside):
    """The answer depends on the profile, not on the machine."""
    assert inside("refused_profile", changes={"deviceVer": 800, "deviceName": "A100"}) == []
