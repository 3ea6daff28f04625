"""Command lines, and the launcher's environment, that no run can follow."""

from __future__ import annotations

import shlex
from pathlib import Path

from megatron.packed.arguments import parse_arguments, validate
from tests.unit.arguments.flags import MINIMAL

from .table import Malformed, assert_refused, cases_of, each

# Given: flags after the smallest command line; variables of the launcher stand before them.
CASES = cases_of(
    ("a misspelt flag", "--hiden-size 4", "unknown flag --hiden-size", "mean --hidden-size?"),
    ("an abbreviated flag", "--hidden 4", "unknown flag --hidden", "did you mean"),
    ("a value without a flag", "64", "unexpected value '64'", "only values of flags are taken"),
    ("a flag without its value", "--seq-length", "--seq-length: needs a value after it"),
    ("a list without values", "--data-path", "--data-path: needs one or more values after it"),
    ("a switch with a value", "--bf16=no", "--bf16: takes no value, but has 'no'", "leave"),
    ("words for a number", "--num-layers many", "--num-layers", "'many' must be a whole number"),
    ("a fraction for a count", "--num-layers 2.5", "--num-layers", "'2.5' must be a whole number"),
    ("no layers", "--num-layers 0", "--num-layers", "'0' must be at least 1"),
    ("layers beyond counting", "--num-layers 1000000000", "--num-layers", "must be at most 100000"),
    ("a number of 41 digits", "--seq-length 1" + "0" * 40, "--seq-length", "must fit in 64 bits"),
    ("a number too long to read", "--seed " + "9" * 5000, "--seed: '9999",
     "(5000 characters) must be a whole number"),
    ("a seed beyond numpy's", "--seed 4294967296", "--seed: '4294967296' must be at most"),
    ("NaN as a learning rate", "--lr nan", "--lr: 'nan' must be a finite number"),
    ("an infinite learning rate", "--lr inf", "--lr: 'inf' must be a finite number"),
    ("a negative clip", "--clip-grad -1", "--clip-grad: '-1' must be at least 0"),
    ("a choice that is none", "--normalization Batch", "'Batch' must be one of LayerNorm, RMSNorm"),
    ("text that no file name holds", "--save '\ud800'", "--save", "that a file name can hold"),
    ("a zero byte in a name", "--save 'a\0b'", "--save: 'a\\x00b' must not hold a zero byte"),
    ("heads that don't divide", "--num-attention-heads 5", "--num-attention-heads 5", "64"),
    ("query groups that don't divide", "--group-query-attention --num-query-groups 3",
     "--num-query-groups 3", "4"),
    ("a batch that replicas can't share", "--global-batch-size 3", "--global-batch-size 3",
     "--micro-batch-size"),
    ("more ranks than the launcher has", "--tensor-model-parallel-size 2",
     "1 processes started, which must be a multiple of tensor 2", "--nproc-per-node"),
    ("layers that stages can't share", "WORLD_SIZE=3 --pipeline-model-parallel-size 3",
     "--pipeline-model-parallel-size 3", "--num-layers"),
    ("two precisions", "--bf16 --fp16", "--bf16", "--fp16"),
    ("two sources of data", "--data-path a", "--data-path and --mock-data", "keep one"),
    ("a tokenizer of another model", "--tokenizer-type BertWordPieceCase",
     "--tokenizer-type BertWordPieceCase is refused", "use one of"),
    ("a tokenizer without its file", "--tokenizer-type Llama2Tokenizer",
     "--tokenizer-type Llama2Tokenizer: needs --tokenizer-model"),
    ("a split of four", "--split 1,1,1,1", "--split 1,1,1,1", "up to three proportions"),
    ("a split of nothing", "--split 0,0,0", "--split 0,0,0", "not all 0"),
    ("retention between saves", "--save x --save-interval 4 --save-retain-interval 6",
     "--save-retain-interval 6: must be a multiple of --save-interval (4)"),
    ("a step without a folder", "--ckpt-step 5", "--ckpt-step 5: needs --load"),
    ("a world that is no number", "WORLD_SIZE=two", "WORLD_SIZE='two'", "torchrun sets it"),
    ("a world of nobody", "WORLD_SIZE=0", "WORLD_SIZE='0'", "must be at least 1"),
    ("a layer list of another length", "--moe-layer-freq ([0]*3+[1])*2 --num-experts 2",
     "--moe-layer-freq ([0]*3+[1])*2: must hold 4 entries", "it holds 8"),
    ("a layer list that is a program", "--moe-layer-freq __import__('os') --num-experts 2",
     "--moe-layer-freq", "must be a whole number or a list of them"),
)  # fmt: skip


@each(CASES)
def test_a_command_line_is_refused(case: Malformed) -> None:
    # Text with lone surrogates, or zero bytes, can't pass a shell's parser.
    words = [word.strip("'") for word in case.given.split(" ")]
    environ = {"WORLD_SIZE": "1"} | dict(w.split("=") for w in words if w.startswith("WORLD_SIZE"))
    flags = [word for word in words if not word.startswith("WORLD_SIZE")]
    assert_refused(
        case,
        lambda: validate(parse_arguments([*MINIMAL.split(), *flags], environ), accelerator="cpu"),
    )


# --- a file that describes the layers -------------------------------------------------------------

GOOD = '{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}'
FLAG = "--heterogeneous-layers-config-path"


def _layers(attention: str = '"n_heads_in_group": 2', ffn: str = '"ffn_mult": 1.0') -> str:
    layer = f'{{"attention": {{{attention}}}, "ffn": {{{ffn}}}}}'
    return f'{{"block_configs": [{", ".join([GOOD] * 3 + [layer])}]}}'


# Given: the text of the file.
LAYER_FILES = cases_of(
    ("no JSON", "{", FLAG, "must be JSON"),
    ("layers nested too deeply", "[" * 100_000, FLAG, "must be JSON: nested too deeply"),
    ("a key twice", '{"block_configs": [], "block_configs": []}', FLAG, "'block_configs' twice"),
    ("no layers in it", "{}", FLAG, "must hold a list block_configs"),
    ("too few layers", f'{{"block_configs": [{GOOD}]}}', FLAG, "1 block_configs", "--num-layers 4"),
    ("no heads in a group", _layers('"n_heads_in_group": 0'), FLAG, "layer 4", "n_heads_in_group"),
    ("infinitely wide", _layers(ffn='"ffn_mult": Infinity'), FLAG, "layer 4", "infinity"),
    ("half a query group", _layers('"num_query_groups": 1.5'), FLAG, "layer 4", "size 1.5"),
    ("a width in words", _layers(ffn='"ffn_hidden_size": "wide"'), FLAG, "layer 4", "size 'wide'"),
    ("a switch in words", _layers('"n_heads_in_group": null, "no_op": "false"'), FLAG,
     "no_op of the attention is 'false', not true or false"),
)  # fmt: skip


@each(LAYER_FILES)
def test_a_file_of_layers_is_refused(case: Malformed, tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text(case.given)
    flags = shlex.split(f"{MINIMAL} {FLAG} {path}")
    assert_refused(case, lambda: validate(parse_arguments(flags, {}), accelerator="cpu"))
