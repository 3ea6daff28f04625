"""Flags that megatron-core's own dataclasses bring: read from source, classified, passed on."""

from __future__ import annotations

import ast
import dataclasses
import types
from pathlib import Path

import pytest
import torch

from megatron.packed.arguments import all_specs, config_from_flags, core_classes
from megatron.packed.arguments.core import build_core_group
from megatron.packed.arguments.core_fields import core_fields, read_dataclass
from megatron.packed.arguments.declare import flag_specs
from megatron.packed.errors import ConfigurationError
from megatron.packed.model import builder, transformer_config
from megatron.packed.training.optimization import core_optimizer_config

from .flags import MINIMAL

REPOSITORY = Path(__file__).parents[3]

SOURCE = '''
@dataclass
class Example:
    """Text."""

    width: int = 3
    """How wide.
       Very."""

    rate: Optional[float] = None
    kind: Literal["a", "b"] | None = "a"
    """One of two"""

    sizes: Optional[List[int]] = None
    names: list[str] = field(default_factory=list)
    on: bool = True
    off: bool = field(default=False, metadata={"argparse_meta": {"arg_names": ["--turn-off"]}})
    large: int = 2**10 * 3
    hook: Optional[Callable] = None
    either: Union[int, List[int]] = 1
    _hidden: int = 1
    dtype: torch.dtype = torch.float32
    """Not for a command line."""

    def __post_init__(self):
        self.later: int = 3
'''


def read() -> dict:
    return {field.name: field for field in read_dataclass(SOURCE, "Example")}


def test_types_defaults_choices_and_help_are_read_from_source() -> None:
    fields = read()
    assert list(fields) == ["width", "rate", "kind", "sizes", "names", "on", "off", "large"]
    assert (fields["width"].value_type, fields["width"].default) == (int, 3)
    assert fields["width"].help == "How wide. Very."
    assert (fields["rate"].value_type, fields["rate"].default) == (float, None)
    assert (fields["kind"].choices, fields["kind"].default) == (("a", "b"), "a")
    assert fields["sizes"].is_list and fields["sizes"].value_type is int
    assert fields["names"].default == ()
    assert fields["off"].names == ("--turn-off",)
    assert fields["large"].default == 3072
    assert fields["rate"].help == ""


def test_what_is_read_agrees_with_the_dataclasses() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    classes = (
        TransformerConfig,
        MLATransformerConfig,
        OptimizerConfig,
        DistributedDataParallelConfig,
    )
    actual: dict[str, dataclasses.Field] = {}
    for cls in classes:
        for given in dataclasses.fields(cls):
            actual.setdefault(given.name, given)
    checked = 0
    for field in core_fields().values():
        given = actual[field.name]
        upstream = given.metadata.get("argparse_meta", {})
        if "default" in upstream:
            assert field.default == upstream["default"]
        elif given.default_factory is not dataclasses.MISSING:
            assert field.default == tuple(given.default_factory())
        else:
            assert field.default == given.default, field.name
        checked += 1
    assert checked > 200


def test_a_new_core_brings_its_flags_and_they_are_passed_on_with_a_word(monkeypatch) -> None:
    new = dataclasses.replace(
        read()["width"], name="brand_new_width", owners=("TransformerConfig",)
    )
    monkeypatch.setattr("megatron.packed.arguments.core.core_fields", lambda: {new.name: new})
    (spec,) = flag_specs(build_core_group({}), "core", "core")
    assert (spec.names, spec.default, spec.disposition) == (("--brand-new-width",), 3, "passed on")


def test_a_setting_that_nothing_here_knows_is_announced_and_passed_on(monkeypatch) -> None:
    dest = "linear_conv_kernel_dim"
    unknown = dataclasses.replace(all_specs()[dest], passed_on=True)
    specs = {**all_specs(), dest: unknown}
    monkeypatch.setattr("megatron.packed.arguments.validation.all_specs", lambda: specs)
    config = config_from_flags(f"{MINIMAL} --linear-conv-kernel-dim 3")
    assert config.core_values([dest]) == {dest: 3}
    (row,) = config.replacements
    assert (row.flag, row.used) == ("--linear-conv-kernel-dim", "as megatron-core does")
    assert config_from_flags(MINIMAL).replacements == ()
    assert config_from_flags(f"{MINIMAL} --linear-conv-kernel-dim 4").replacements == ()


def test_known_settings_reach_core_only_if_given_and_kept() -> None:
    config = config_from_flags(
        f"{MINIMAL} --linear-num-key-heads 4 --tp-comm-overlap --offload-modules core_attn"
    )
    accepted = [
        "linear_num_key_heads",
        "tp_comm_overlap",
        "offload_modules",
        "wgrad_deferral_limit",
    ]
    assert config.core_values(accepted) == {"linear_num_key_heads": 4}
    assert config.core_values([]) == {}
    assert {row.flag for row in config.replacements} == {"--tp-comm-overlap", "--offload-modules"}


def test_the_tables_name_no_field_twice() -> None:
    tables = [
        core_classes.INTERNAL,
        core_classes.REPLACED.keys(),
        core_classes.REFUSED.keys(),
        core_classes.REFUSED_ON_CPU.keys(),
        core_classes.HONOURED,
    ]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))


def test_every_setting_of_the_installed_core_has_a_class() -> None:
    """A new core's settings are passed on with a word, until somebody has read what they do."""
    assert [spec.name for spec in all_specs().values() if spec.passed_on] == []


def test_defaults_are_those_of_upstreams_parser() -> None:
    assert all_specs()["optimizer_offload_fraction"].default == 1.0
    flags = f"{MINIMAL} --optimizer-offload-fraction "
    assert config_from_flags(flags + "1.0").replacements == ()
    (row,) = config_from_flags(flags + "0.5").replacements
    assert row.used == "as it is"


@pytest.mark.parametrize("name", sorted(core_classes.REFUSED))
def test_every_refusal_says_why_and_what_to_do(name: str) -> None:
    if name not in all_specs():
        pytest.skip("this megatron-core has no such setting")
    spec = all_specs()[name]
    value = "" if not spec.takes_value else (spec.choices or ("3",))[-1]
    with pytest.raises(ConfigurationError) as caught:
        config_from_flags(f"{MINIMAL} {spec.name} {value}")
    assert f"{spec.name} {value}".strip() in str(caught.value)
    assert f"is refused: {core_classes.REFUSED[name]}" in str(caught.value)
    assert ";" in core_classes.REFUSED[name] or ":" in core_classes.REFUSED[name]


@pytest.mark.parametrize("name", sorted(core_classes.REPLACED))
def test_every_replacement_is_listed(name: str) -> None:
    if name not in all_specs() or all_specs()[name].group != "core":
        pytest.skip("this megatron-core has no such setting, or a group of its own declares it")
    spec, row = all_specs()[name], core_classes.REPLACED[name]
    value = ""
    if spec.takes_value:
        others = [choice for choice in spec.choices if choice != spec.default]
        value = others[0] if others else "core_attn" if spec.value_type is str else "1"
        if spec.default == 1:
            value = "0.5" if spec.value_type is float else "2"
    config = config_from_flags(f"{MINIMAL} {spec.name} {value}")
    rows = [listed for listed in config.replacements if listed.flag == spec.name]
    if spec.negative:  # turns off what isn't there
        assert not rows and config.core_values([name]) == {}
        return
    (listed,) = rows
    assert (listed.used, listed.why) == (row.used, row.why)
    assert config.get(name) == spec.default
    assert config.core_values([name]) == {}


def test_fp8_is_refused_where_there_is_no_such_arithmetic() -> None:
    flags = f"{MINIMAL} --fp8-format hybrid --fp8-recipe tensorwise"
    with pytest.raises(ConfigurationError, match="--fp8-format hybrid is refused: fp8 rounds"):
        config_from_flags(flags)
    config = config_from_flags(flags, accelerator="cuda")
    assert config.core_values(["fp8", "fp8_recipe"]) == {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
    }
    assert config_from_flags(f"{MINIMAL} --fp8-recipe tensorwise").replacements == ()


@pytest.mark.parametrize(
    ("path", "function"),
    [
        ("megatron/packed/model/transformer_config.py", "config_class"),
        ("megatron/packed/model/builder.py", "DistributedDataParallelConfig"),
        ("megatron/packed/training/optimization.py", "OptimizerConfig"),
    ],
)
def test_no_setting_is_both_passed_on_and_set_by_hand(path: str, function: str) -> None:
    """A keyword given twice is an error, and a setting overruled in silence would be worse."""
    tree = ast.parse((REPOSITORY / path).read_text())
    by_hand = {
        keyword.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(function)
        for keyword in node.keywords
    }
    assert len(by_hand) > 4
    automatic = {spec.dest for spec in all_specs().values() if spec.group == "core"}
    assert not automatic & by_hand


PRECISION_AWARE = f"{MINIMAL} --use-precision-aware-optimizer --use-distributed-optimizer"


def test_a_precision_aware_optimizer_in_fp32_is_the_plain_one() -> None:
    config = config_from_flags(f"{PRECISION_AWARE} --exp-avg-dtype fp32")
    (row,) = config.replacements
    assert (row.flag, row.used) == (
        "--use-precision-aware-optimizer",
        "the plain distributed optimizer",
    )
    assert core_optimizer_config(config) == core_optimizer_config(
        config_from_flags(f"{MINIMAL} --use-distributed-optimizer")
    )


@pytest.mark.parametrize(
    "flags",
    ["--exp-avg-dtype bf16", "--exp-avg-sq-dtype fp8", "--main-params-dtype fp16"]
    + ["--main-grads-dtype bf16 --bf16 --grad-reduce-in-bf16"],
)
def test_states_of_fewer_bits_are_refused_where_no_optimizer_keeps_them(flags: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_from_flags(f"{PRECISION_AWARE} {flags}")
    name_and_value = " ".join(flags.split()[:2])
    assert str(caught.value).startswith(f"{name_and_value} is refused: fewer bits train another")


def test_states_of_fewer_bits_reach_core_where_its_optimizer_is(monkeypatch) -> None:
    flags = f"{PRECISION_AWARE} --bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8 "
    config = config_from_flags(flags + "--main-params-dtype fp16", accelerator="cuda")
    assert config.replacements == ()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="the package transformer_engine isn't installed"):
        core_optimizer_config(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(
        "megatron.packed.training.optimization.OptimizerConfig", types.SimpleNamespace
    )
    monkeypatch.setattr("dataclasses.fields", lambda of: ())
    found = core_optimizer_config(config)
    assert found.use_precision_aware_optimizer
    assert (found.main_grads_dtype, found.main_params_dtype) == (torch.float32, torch.float16)
    assert (found.exp_avg_dtype, found.exp_avg_sq_dtype) == (torch.bfloat16, torch.uint8)


def test_buckets_of_gradients_reach_core_where_they_overlap(monkeypatch) -> None:
    flags = f"{MINIMAL} --use-distributed-optimizer --ddp-pad-buckets-for-high-nccl-busbw"
    config = config_from_flags(f"{flags} --ddp-num-buckets 3")
    assert config.core_values(["pad_buckets_for_high_nccl_busbw"]) == {
        "pad_buckets_for_high_nccl_busbw": True
    }
    (row,) = config.replacements
    assert (row.flag, row.asked, row.used) == ("--ddp-num-buckets", "3", "one bucket")
    assert config.parallel.ddp_num_buckets is None
    config = config_from_flags(f"{flags} --ddp-bucket-size 100", accelerator="cuda")
    assert config.core_values(["bucket_size"]) == {"bucket_size": 100}
    config = config_from_flags(f"{flags} --ddp-num-buckets 3", accelerator="cuda")
    assert config.parallel.ddp_num_buckets == 3
    monkeypatch.setattr(builder, "DistributedDataParallel", types.SimpleNamespace)
    model = torch.nn.Linear(9, 10)
    overlapping = config_from_flags(
        f"{flags} --ddp-num-buckets 3 --overlap-grad-reduce", accelerator="cuda"
    )
    wrapped = builder.wrap_for_training(overlapping, types.SimpleNamespace(), model)
    assert wrapped.ddp_config.bucket_size == 100 // 3
    assert wrapped.ddp_config.pad_buckets_for_high_nccl_busbw
    assert not wrapped.disable_bucketing


@pytest.mark.skipif(
    "moe_flex_dispatcher_num_sms" not in all_specs(), reason="a setting of newer megatron-core"
)
def test_one_number_of_multiprocessors_for_every_library() -> None:
    flags = (
        f"{MINIMAL} --num-experts 4 --disable-bias-linear --moe-token-dispatcher-type flex "
        "--moe-flex-dispatcher-num-sms 24"
    )
    config = config_from_flags(flags, accelerator="cuda")
    fields = transformer_config._experts(config)
    assert not {"moe_deepep_num_sms", "moe_hybridep_num_sms"} & fields.keys()
    assert config.core_values(["moe_flex_dispatcher_num_sms"]) == {
        "moe_flex_dispatcher_num_sms": 24
    }


@pytest.mark.skipif("mtp_use_repeated_layer" not in all_specs(), reason="of newer megatron-core")
def test_one_layer_for_all_predictions_has_no_experts() -> None:
    flags = f"{MINIMAL} --mtp-num-layers 2 --mtp-use-repeated-layer"
    assert config_from_flags(flags).replacements == ()
    with pytest.raises(ConfigurationError, match="--mtp-use-repeated-layer: the losses of its"):
        config_from_flags(f"{flags} --num-experts 4 --disable-bias-linear")
