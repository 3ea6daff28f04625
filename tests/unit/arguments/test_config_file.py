"""Settings from a file: names, values, precedence, mistakes, and how the result is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.packed.arguments import (
    Config,
    ConfigFileError,
    config_report,
    parse_arguments,
    validate,
)

from .flags import MINIMAL


@pytest.fixture
def parse(tmp_path: Path):
    """Parse flags together with the text of a config file."""

    def read(text: str, extra: str = "", flags: str = MINIMAL, **environ: str) -> Config:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return parse_arguments(f"{flags} {extra} --config-file {path}".split(), environ)

    return read


def test_a_file_can_hold_a_whole_run(parse) -> None:
    words = MINIMAL.split()
    lines = []
    for index, word in enumerate(words):
        if word.startswith("--"):
            value = (*words, "--")[index + 1]
            lines.append(f"{word}: {'true' if value.startswith('--') else value}")
    from_file = parse("\n".join(lines), flags="")
    from_flags = parse_arguments(MINIMAL.split(), {})
    assert {**from_file.given, "config_file": None} == {**from_flags.given, "config_file": None}


@pytest.mark.parametrize("key", ["--norm-epsilon", "norm-epsilon", "norm_epsilon"])
def test_flags_with_and_without_dashes_and_field_names(parse, key: str) -> None:
    assert parse(f"{key}: 1e-6").model.norm_epsilon == 1e-6


def test_the_command_line_wins_over_the_file_and_that_over_the_default(parse) -> None:
    config = parse("seed: 5\nlr: 2e-3\nclip-grad: 0.5", "--seed 7")
    assert (config.training.seed, config.sources["seed"]) == (7, "command line")
    assert (config.optimization.lr, config.sources["lr"]) == (1e-3, "command line")
    assert (config.optimization.clip_grad, config.sources["clip_grad"]) == (0.5, "config file")
    assert "adam_beta1" not in config.sources


def test_switches_by_flag_and_by_field(parse) -> None:
    assert parse("bf16: true").training.bf16
    assert not parse("bf16: false").training.bf16
    assert not parse("disable-bias-linear: true").model.add_bias_linear
    assert parse("disable-bias-linear: false").model.add_bias_linear
    assert not parse("add_bias_linear: false").model.add_bias_linear
    assert parse("add_bias_linear: true").model.add_bias_linear


def test_lists_numbers_in_quotes_and_nothing(parse) -> None:
    text = "valid-data-path: [a, b]\ntrain-data-path: 0.3 a 0.7 b\nlr-warmup-init: '1e-7'\nseed:"
    config = parse(text)
    assert config.data.valid_data_path == ("a", "b")
    assert config.data.train_data_path == ("0.3", "a", "0.7", "b")
    assert config.optimization.lr_warmup_init == 1e-7
    assert config.training.seed == 1234 and "seed" not in config.sources


def test_an_empty_file_changes_nothing(parse) -> None:
    assert parse("").training == parse_arguments(MINIMAL.split(), {}).training


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num-layer: 3", "unknown setting num-layer: did you mean --num-layers?"),
        ("hiden_size: 3", "unknown setting hiden_size: did you mean --hidden-size?"),
        ("zzz: 3", "unknown setting zzz: --help lists every flag"),
        ("seed: x", "seed: 'x' must be a whole number"),
        ("seed: 2.5", "seed: '2.5' must be a whole number"),
        ("seed: true", "seed: takes a value, not true or false"),
        ("seed: [1, 2]", "seed: takes one value, not 2"),
        ("seed: {a: 1}", "seed: takes a value, not a dict"),
        ("norm-epsilon: 0", "norm-epsilon: '0' must be greater than 0"),
        ("normalization: X", "normalization: 'X' must be one of LayerNorm, RMSNorm"),
        ("bf16: 1", "bf16: 1 must be true or false"),
        ("world_size: 2", "world_size: is the launcher's, which sets WORLD_SIZE"),
        ("config-file: b.yaml", "config-file: a file can't name another one"),
        ("bf16: true\n--bf16: true", "--bf16: set twice"),
        ("- bf16", "must hold settings, one `name: value` a line, not a list"),
        ("a: [", "isn't YAML"),
    ],
)
def test_a_mistake_names_file_setting_and_rule(parse, text: str, message: str) -> None:
    with pytest.raises(ConfigFileError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("--config-file ") and "run.yaml: " in str(caught.value)


def test_all_mistakes_are_listed(parse) -> None:
    with pytest.raises(ConfigFileError) as caught:
        parse("zzz: 1\nseed: x")
    assert len(str(caught.value).splitlines()) == 2


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigFileError, match="none.yaml: can't be read"):
        parse_arguments(["--config-file", "none.yaml"], {})


def test_the_whole_report_shows_every_setting_and_its_source(parse) -> None:
    config = validate(parse("seed: 5", WORLD_SIZE="2"), accelerator="cpu")
    rows = {
        line.split()[1]: line.split()
        for line in config_report(config, everything=True).splitlines()
    }
    assert rows["seed"] == ["training", "seed", "5", "config", "file"]
    assert rows["num_layers"][2:] == ["4", "command", "line"]
    assert rows["world_size"][2:] == ["2", "environment"]
    assert rows["kv_channels"][2:] == ["16", "derived"]
    assert rows["clip_grad"][2:] == ["1", "default"]
    assert rows["distributed_backend"][2:] == ["gloo", "replaced"]
