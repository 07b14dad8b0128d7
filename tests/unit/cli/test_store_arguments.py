"""Settings from arguments, files and the environment."""

import json

import pytest

from tutti_mooncake.cli.main import build_parser, main
from tutti_mooncake.cli.store_arguments import setting_sources, store_config
from tutti_mooncake.errors import ConfigError


@pytest.fixture
def parse():
    parser = build_parser()
    return lambda *arguments: parser.parse_args(["config", *arguments])


def test_arguments_win_over_the_file_and_the_file_over_the_environment(parse, tmp_path, monkeypatch):
    file = tmp_path / "tutti.toml"
    file.write_text('devices = ["/a"]\npool = "from-file"\nlanes = 2\n')
    monkeypatch.setenv("TUTTI_POOL", "from-environment")
    monkeypatch.setenv("TUTTI_QUEUE_DEPTH", "8")
    arguments = parse("--config", str(file), "--devices", "/b,/c", "--set", "lanes=3")
    config = store_config(arguments)
    assert (config.devices, config.pool, config.lanes, config.queue_depth) == (("/b", "/c"), "from-file", 3, 8)
    sources = setting_sources(arguments, {"TUTTI_POOL": "x", "TUTTI_QUEUE_DEPTH": "8"})
    assert sources["devices"] == "--devices"
    assert sources["pool"] == str(file)
    assert sources["lanes"] == "--set"
    assert sources["queue_depth"] == "$TUTTI_QUEUE_DEPTH"
    assert sources["durability"] == "default"


def test_json_file(parse, tmp_path):
    file = tmp_path / "tutti.json"
    file.write_text(json.dumps({"devices": ["/a"], "capacity": "1GiB"}))
    assert store_config(parse("--config", str(file))).capacity_bytes == 1 << 30


@pytest.mark.parametrize(("content", "message"), [("[1]", "not a list"), ("{", "line 1 column 2")])
def test_a_wrong_file_says_where(parse, tmp_path, content, message):
    file = tmp_path / "tutti.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        store_config(parse("--config", str(file)))


def test_a_missing_file_is_named(parse):
    with pytest.raises(ConfigError, match="/absent.json: No such file"):
        store_config(parse("--config", "/absent.json"))


def test_an_unknown_setting_names_the_nearest(capsys):
    assert main(["config", "--devices", "/a", "--set", "capacty=1GiB"]) == 1
    assert "did you mean 'capacity'?" in capsys.readouterr().err


def test_errors_are_json_too(capsys):
    assert main(["config", "--devices", "/a", "--set", "lanes", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == "ConfigError"


def test_config_hides_the_salt(capsys):
    assert main(["config", "--devices", "/a", "--set", "tenant_salt=secret", "--json"]) == 0
    text = capsys.readouterr().out
    assert "secret" not in text
    assert json.loads(text)["config"]["devices"] == ["/a"]
