"""Reading argv: values, unknown flags, bad values, help, and what importing costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.packed.arguments import (
    CommandLineError,
    Config,
    all_specs,
    parse_arguments,
)
from megatron.packed.arguments.parser import read_command_line
from megatron.packed.errors import ConfigurationError

from .flags import MINIMAL


def parse(extra: str = "", **environ: str) -> Config:
    return parse_arguments(f"{MINIMAL} {extra}".split(), environ)


def refusal(extra: str, **environ: str) -> str:
    with pytest.raises(CommandLineError) as caught:
        parse(extra, **environ)
    return str(caught.value)


def test_both_spellings_of_a_value_agree() -> None:
    assert parse("--seed 7") == parse("--seed=7")
    assert parse("--seed 7").training.seed == 7


def test_the_last_of_a_repeated_flag_wins() -> None:
    assert parse("--seed 7 --seed 8").training.seed == 8


def test_defaults_are_upstreams() -> None:
    config = parse()
    assert (config.optimization.adam_beta2, config.optimization.clip_grad) == (0.999, 1.0)
    assert (config.evaluation.eval_iters, config.evaluation.eval_interval) == (100, 1000)
    assert config.model.position_embedding_type == "learned_absolute"
    assert config.model.hidden_dropout == 0.1
    assert config.optimization.lr_decay_style == "linear"
    assert config.training.seed == 1234
    assert config.data.num_workers == 2
    assert config.data.split is None


def test_switches_and_their_negatives() -> None:
    assert parse().model.add_bias_linear and not parse().training.bf16
    config = parse("--disable-bias-linear --bf16 --no-mmap-bin-files")
    assert not config.model.add_bias_linear
    assert config.training.bf16
    assert not config.data.mmap_bin_files


def test_a_list_ends_at_the_next_flag() -> None:
    config = parse("--data-path 0.3 a 0.7 b --bf16")
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert config.training.bf16


@pytest.mark.parametrize("number", ["-1", "-1.5", "-1e-5", "-.5", "-2E+3"])
def test_a_negative_number_is_a_value_not_a_flag(number: str) -> None:
    assert refusal(f"--min-lr {number}") == f"--min-lr: '{number}' must be at least 0"


def test_scientific_notation() -> None:
    assert parse("--lr 3e-4 --weight-decay 1e-2").optimization.lr == 3e-4


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("--num-layer 3", "--num-layers"),
        ("--use-packed-sequense", "--use-packed-sequence"),
        ("--tensor-parallel-size=2", "--tensor-model-parallel-size"),
        ("--nomalization RMSNorm", "--normalization"),
    ],
)
def test_an_unknown_flag_gets_the_nearest_known_one(typo: str, meant: str) -> None:
    name = typo.replace("=", " ").split()[0]
    assert refusal(typo) == f"unknown flag {name}: did you mean {meant}?"


def test_a_flag_like_no_other_points_to_the_help() -> None:
    assert refusal("--zzz") == "unknown flag --zzz: --help lists every flag"


def test_several_unknown_flags_are_all_named() -> None:
    message = refusal("--num-layer 3 --zzz 1 2")
    assert message.splitlines() == [
        "unknown flag --num-layer: did you mean --num-layers?",
        "unknown flag --zzz: --help lists every flag",
    ]


def test_abbreviations_are_off() -> None:
    assert "unknown flag --hidden" in refusal("--hidden 64")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--num-layers x", "--num-layers: 'x' must be a whole number"),
        ("--num-layers 2.5", "--num-layers: '2.5' must be a whole number"),
        ("--num-layers 0", "--num-layers: '0' must be at least 1"),
        ("--lr fast", "--lr: 'fast' must be a number"),
        ("--lr nan", "--lr: 'nan' must be a finite number"),
        ("--lr inf", "--lr: 'inf' must be a finite number"),
        ("--hidden-dropout 1.0", "--hidden-dropout: '1.0' must be less than 1"),
        ("--rotary-percent 0", "--rotary-percent: '0' must be greater than 0"),
        ("--rotary-percent 1.1", "--rotary-percent: '1.1' must be at most 1"),
        ("--num-workers -1", "--num-workers: '-1' must be at least 0"),
        ("--normalization X", "--normalization: 'X' must be one of LayerNorm, RMSNorm"),
        ("--lr", "--lr: needs a value after it"),
        ("--data-path", "--data-path: needs one or more values after it"),
        (
            "--bf16=true",
            "--bf16: takes no value, but has 'true'; leave the flag out to turn it off",
        ),
        ("--bf16 true", "unexpected value 'true' after --bf16; only values of flags are taken"),
    ],
)
def test_a_bad_value_names_flag_value_and_rule(extra: str, message: str) -> None:
    assert refusal(extra) == message


def test_missing_flags_are_listed_together() -> None:
    with pytest.raises(CommandLineError) as caught:
        parse_arguments(["--num-layers", "2", "--lr", "1"], {})
    assert str(caught.value).startswith(
        "missing: --hidden-size, --num-attention-heads, --micro-batch-size, --train-iters, "
        "--seq-length; a run needs them"
    )


def test_the_launchers_variables() -> None:
    config = parse("", WORLD_SIZE="8", RANK="5", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", HOME="/")
    parallel = config.parallel
    assert (parallel.world_size, parallel.rank, parallel.local_rank) == (8, 5, 1)
    assert parallel.local_world_size == 4
    assert config.sources["rank"] == "environment"
    assert parse().parallel.world_size == 1


@pytest.mark.parametrize(
    ("variable", "value", "rule"),
    [("WORLD_SIZE", "0", "at least 1"), ("RANK", "one", "a whole number"), ("RANK", "-1", "at")],
)
def test_a_bad_launcher_variable_is_named(variable: str, value: str, rule: str) -> None:
    message = refusal("", **{variable: value})
    assert f"environment variable {variable}={value!r}" in message
    assert rule in message


def test_a_command_line_error_is_a_configuration_error() -> None:
    assert issubclass(CommandLineError, ConfigurationError)
    assert CommandLineError("").exit_code == 2


def test_help_is_grouped_and_shows_every_flag_with_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--help"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for section in ("network size", "regularization", "learning rate", "distributed", "tokenizer"):
        assert f"\n{section}:\n" in text
    words = text.replace(", --", " --").split()
    for spec in all_specs().values():
        assert all(name in words for name in spec.names)
    flat = " ".join(words)
    assert "(default: 1234)" in flat
    assert "(default: hidden size / attention heads)" in flat
    assert "(required)" in flat


def test_importing_and_help_are_quick_since_torch_stays_out() -> None:
    program = (
        "import sys, contextlib, io\n"
        "from megatron.packed.arguments import config_from_flags, parse_arguments\n"
        f"config_from_flags({MINIMAL!r})\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    parse_arguments(['--help'], {})\n"
        "heavy = {'torch', 'numpy', 'megatron.core'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_window_without_an_end_is_a_value_not_a_flag() -> None:
    assert read_command_line(["--window-size", "-1,0"]) == {"window_size": "-1,0"}
