"""Files for --config-file that hold no settings, or others than they seem to."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.packed.arguments import parse_arguments, validate
from tests.unit.arguments.flags import MINIMAL

from .table import Malformed, assert_refused, cases_of, each, written

FLAG = "--config-file"

# Given: the content of the file.
CASES = cases_of(
    ("a Python object", "seed: !!python/object/apply:os.system ['touch was-run']", FLAG,
     "could not determine a constructor", "python/object/apply:os.system"),
    ("a Python name", "save: !!python/name:os.system", FLAG, "python/name:os.system"),
    ("bytes", "save: !!binary aGk=", FLAG, "could not determine a constructor", "binary"),
    ("a set", "save: !!set {a}", FLAG, "could not determine a constructor", "yaml.org,2002:set"),
    ("an ordered mapping", "seed: !!omap [a: 1]", FLAG, "yaml.org,2002:omap"),
    ("one setting twice", "seed: 1\nbf16: true\nseed: 2", FLAG,
     "seed: set twice, in lines 1 and 3"),
    ("one setting by two names", "seq_length: 64\nseq-length: 65", FLAG, "seq-length: set twice"),
    ("an unknown setting", "hiden-size: 3", FLAG, "unknown setting hiden-size", "--hidden-size?"),
    ("an unknown setting by number", "1: 2", FLAG, "unknown setting 1"),
    ("a list at the top", "- seed", FLAG, "must hold settings", "not a list"),
    ("a text at the top", "seed", FLAG, "must hold settings", "not a str"),
    ("a number at the top", "17", FLAG, "must hold settings"),
    ("tabs", "seed:\n\t1", FLAG, "'\\t'"),
    ("no UTF-8", b"seed: \xff", FLAG, "run.yaml: isn't YAML", "decode"),
    ("two documents", "seed: 1\n---\nseed: 2", FLAG, "expected a single document"),
    ("another YAML", "%YAML 3.0\n---\nseed: 1", FLAG, "incompatible YAML document"),
    ("nested too deeply", "[" * 3000, FLAG, "nested too deeply"),
    ("a list in itself", "seed: &a [*a]", FLAG, "recursive"),
    ("a list as a name", "? [a]\n: b", FLAG, "unhashable key"),
    ("a mapping tagged as a list", "!!map [a]", FLAG, "expected a mapping node"),
    ("an open bracket", "seed: [1", FLAG, "isn't YAML"),
    ("a zero byte", 'save: "a\\0b"', FLAG, "save: 'a\\x00b' must not hold a zero byte"),
    ("half a character", 'save: "a\\ud800"', FLAG, "save", "text that a file name can hold"),
    ("an open quote in a list", "data-path: 'a \"b'", FLAG, "data-path", "No closing quotation"),
    ("an empty list", "data-path: []", FLAG, "data-path: needs one or more values"),
    ("nothing in a list", "data-path: [a, null]", FLAG, "data-path: takes a value, not null"),
    ("a number by tag", "seed: !!int x", FLAG, "seed: 'x' must be a whole number"),
    ("a switch by tag", "bf16: !!bool x", FLAG, "x must be true or false"),
    ("a date that is none", "seed: 2020-99-99", FLAG, "seed: '2020-99-99' must be a whole number"),
    ("a time for a number", "seed: 12:30", FLAG, "seed: '12:30' must be a whole number"),
    ("a switch by number", "bf16: 1", FLAG, "bf16: 1 must be true or false"),
    ("a switch by text", "bf16: 'true'", FLAG, "bf16: 'true' must be true or false"),
    ("a yes for a name", "save: yes", FLAG, "save: takes a value, not true or false", "quotes"),
    ("YAML's own infinity", "lr: .inf", FLAG, "lr: '.inf' must be a number"),
    ("a mapping for a number", "seed: {a: 1}", FLAG, "seed: takes a value, not a dict"),
    ("5,000 digits", "seed: " + "9" * 5000, FLAG, "(5000 characters) must be a whole number"),
    ("another file", "config-file: b.yaml", FLAG, "a file can't name another one"),
    ("what the launcher says", "world_size: 2", FLAG, "is the launcher's, which sets WORLD_SIZE"),
)  # fmt: skip


@each(CASES)
def test_a_file_of_settings_is_refused(
    case: Malformed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "run.yaml", case.given)
    flags = [*MINIMAL.replace("--lr 1e-3", "").split(), "--config-file", "run.yaml"]
    assert_refused(case, lambda: validate(parse_arguments(flags, {}), accelerator="cpu"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.yaml"]  # nothing was run


def test_numbers_mean_what_they_mean_on_the_command_line(tmp_path: Path) -> None:
    """YAML's own octal, sexagesimal and shortened numbers are not what a user wrote."""
    path = written(tmp_path / "run.yaml", "seed: 010\nsave: 1.10\nload: 0x10\nlr-warmup-init: 1e-7")
    config = parse_arguments([*MINIMAL.split(), "--config-file", str(path)], {})
    assert config.training.seed == 10 and config.optimization.lr_warmup_init == 1e-7
    assert (config.checkpoint.save, config.checkpoint.load) == ("1.10", "0x10")
