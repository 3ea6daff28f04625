"""Derived defaults, replacements, overrides and the start-up reports."""

from __future__ import annotations

import dataclasses
import pickle
import types

import pytest

from megatron.packed.arguments import (
    Config,
    all_specs,
    config_from_flags,
    config_report,
    override,
    parse_arguments,
    replacement_report,
    validate,
)
from megatron.packed.arguments.declare import derived, flag, flag_specs, required
from megatron.packed.errors import ConfigurationError

from .flags import MINIMAL


def build(flags: str = "", world_size: int = 1, accelerator: str = "cpu") -> Config:
    environ = {"WORLD_SIZE": str(world_size)}
    return config_from_flags(f"{MINIMAL} {flags}", environ, accelerator=accelerator)


def test_derived_defaults() -> None:
    config = build(world_size=3)
    assert config.model.ffn_hidden_size == 256
    assert config.model.kv_channels == 16
    assert config.model.num_query_groups == 4
    assert config.model.max_position_embeddings == 128
    assert config.model.add_qkv_bias
    assert config.training.global_batch_size == 6
    assert config.parallel.data_parallel_size == 3
    assert config.optimization.lr_decay_iters == 100
    assert config.optimization.start_weight_decay == config.optimization.weight_decay
    assert config.data.split == "1,1,1"
    assert config.data.dataloader_type == "single"
    assert config.runtime.threads >= 1
    assert config.device_type == "cpu"


@pytest.mark.parametrize(("hidden", "ffn"), [(64, 128), (4096, 10880), (1024, 2688)])
def test_swiglu_keeps_the_parameter_count(hidden: int, ffn: int) -> None:
    assert build(f"--swiglu --hidden-size {hidden}").model.ffn_hidden_size == ffn


def test_a_validated_config_has_every_derived_field() -> None:
    config = build()
    unset = [d for d, s in all_specs().items() if s.default_rule and config.get(d) is None]
    assert unset == []


def test_given_values_are_kept() -> None:
    config = build("--kv-channels 32 --ffn-hidden-size 100 --global-batch-size 8")
    assert config.model.kv_channels == 32
    assert config.model.ffn_hidden_size == 100
    assert config.training.global_batch_size == 8


def test_the_split_follows_the_kind_of_data() -> None:
    real = MINIMAL.replace("--mock-data", "")
    assert config_from_flags(f"{real} --data-path a").data.split == "969,30,1"
    assert config_from_flags(f"{real} --train-data-path a").data.split is None


def test_packing_implies_what_it_does() -> None:
    config = build("--use-packed-sequence")
    assert config.training.calculate_per_token_loss
    assert config.data.reset_position_ids and config.data.reset_attention_mask
    assert config.data.eod_mask_loss
    assert not build().data.eod_mask_loss
    assert config == build("--use-packed-sequence --reset-position-ids --eod-mask-loss")


def test_older_spellings() -> None:
    assert build("--use-flash-attn").model.attention_backend == "flash"
    assert build("--recompute-activations").training.recompute_granularity == "selective"


def test_sequence_parallel_is_off_with_one_tensor_parallel_process() -> None:
    config = build("--sequence-parallel")
    assert not config.parallel.sequence_parallel
    assert [row.flag for row in config.replacements] == ["--sequence-parallel"]


def test_how_to_recompute_means_nothing_without_what() -> None:
    config = build("--recompute-method uniform --recompute-num-layers 1")
    assert config.training.recompute_method is None
    assert config.training.recompute_num_layers is None
    rows = {row.flag: row.used for row in config.replacements}
    assert rows["--recompute-method"] == rows["--recompute-num-layers"] == "no recomputation"


def test_query_groups_need_their_switch() -> None:
    assert build("--num-query-groups 2").model.num_query_groups == 4
    grouped = build("--num-query-groups 2 --group-query-attention")
    assert grouped.model.num_query_groups == 2
    assert build("--group-query-attention").model.num_query_groups == 1


def test_a_cpu_replaces_what_needs_cuda_and_says_so_if_asked() -> None:
    quiet = build()
    assert quiet.parallel.distributed_backend == "gloo"
    assert quiet.model.transformer_impl == "local"
    assert not quiet.kernels.bias_gelu_fusion
    assert quiet.replacements == ()
    assert replacement_report(quiet) == ""

    asked = build(
        "--distributed-backend nccl --attention-backend flash --cross-entropy-loss-fusion "
        "--no-rope-fusion --overlap-grad-reduce"
    )
    assert {row.flag for row in asked.replacements} == {
        "--distributed-backend",
        "--attention-backend",
        "--cross-entropy-loss-fusion",
        "--overlap-grad-reduce",
    }
    assert asked.model.attention_backend == "flash"
    assert not asked.parallel.overlap_grad_reduce
    table = replacement_report(asked).splitlines()
    assert table[0].split() == ["flag", "asked", "used", "why"]
    assert any(row.split()[:3] == ["--distributed-backend", "nccl", "gloo"] for row in table)


def test_strict_flags_turn_every_replacement_into_an_error() -> None:
    asked = "--strict-flags --overlap-grad-reduce --use-megatron-fsdp"
    with pytest.raises(ConfigurationError) as caught:
        build(asked)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert any("--overlap-grad-reduce on: would be replaced by reduction after" in x for x in lines)
    assert any("--use-megatron-fsdp on: would be replaced by Distributed" in x for x in lines)
    assert build("--strict-flags --use-packed-sequences").packing.use_packed_sequence


@pytest.mark.parametrize(
    ("flags", "meaning"),
    [
        ("--use-packed-sequences", "--use-packed-sequence"),
        ("--packed-seq-cu-seqlens-style flash_attn", "--use-packed-sequence"),
        ("--dataloader-inter-document-masking", "--use-packed-sequence"),
        ("--use-flash-attn", "--attention-backend flash"),
    ],
)
def test_other_spellings_are_followed_and_announced(flags: str, meaning: str) -> None:
    config, plain = build(flags), build(meaning)
    assert config.packing == plain.packing and config.training == plain.training
    assert config.model == plain.model
    row = next(row for row in config.replacements if row.flag == flags.split()[0])
    assert (row.used, row.exact_spelling) == (meaning, True)
    assert validate(config).replacements == config.replacements


def test_cuda_keeps_what_was_asked() -> None:
    config = build("--overlap-grad-reduce --no-rope-fusion", accelerator="cuda")
    assert config.parallel.distributed_backend == "nccl"
    assert config.parallel.overlap_grad_reduce
    assert config.kernels.bias_gelu_fusion and not config.kernels.apply_rope_fusion
    assert config.replacements == ()


def test_an_explicit_accelerator_wins_over_the_machines() -> None:
    assert build("--accelerator cpu", accelerator="cuda").device_type == "cpu"
    with pytest.raises(ConfigurationError, match="isn't resolved yet"):
        parse_arguments(MINIMAL.split(), {}).device_type  # noqa: B018


def test_override_derives_anew() -> None:
    config = build()
    wider = override(config, hidden_size=128, tensor_model_parallel_size=2, world_size=2)
    assert wider.model.ffn_hidden_size == 512
    assert wider.model.kv_channels == 32
    assert wider.training.global_batch_size == 2
    assert config.model.hidden_size == 64
    assert override(config) == config


def test_override_remembers_what_was_asked() -> None:
    config = build("--sequence-parallel")
    assert not config.parallel.sequence_parallel
    two = override(config, tensor_model_parallel_size=2, world_size=2)
    assert two.parallel.sequence_parallel
    assert two.replacements == ()


def test_warmup_in_iterations() -> None:
    assert build("--lr-warmup-fraction 0.25").optimization.warmup_iters == 25
    assert build("--lr-warmup-iters 7").optimization.warmup_iters == 7


def test_validation_is_idempotent() -> None:
    config = build("--bf16 --swiglu --use-packed-sequence")
    assert validate(config) == config


def test_configs_are_frozen_hashable_and_survive_pickling() -> None:
    config = build()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.num_layers = 3  # type: ignore[misc]
    assert hash(config) == hash(build())
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config and copy.sources == config.sources


def test_the_report_lists_what_is_not_default_and_where_it_came_from() -> None:
    lines = config_report(build("--bf16", world_size=2)).splitlines()
    rows = {line.split()[1]: line.split() for line in lines[1:]}
    assert rows["bf16"] == ["training", "bf16", "on", "command", "line"]
    assert not {"world_size", "rank", "local_rank"} & rows.keys()
    assert rows["ffn_hidden_size"] == ["model", "ffn_hidden_size", "256", "derived"]
    assert "norm_epsilon" not in rows
    column = lines[0].index("value")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)


def test_every_flag_has_help_and_a_type_the_parser_knows() -> None:
    for spec in all_specs().values():
        assert spec.help.endswith("."), spec.dest
        assert spec.value_type in (bool, int, float, str), spec.dest
        assert not (spec.negative and spec.default is not True), spec.dest
        assert spec.disposition in ("honoured", "replaced", "refused", "passed on")


def test_declarations_read_back() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Group:
        first_size: int = required("First.", at_least=1)
        names: tuple[str, ...] | None = flag("Names.")
        rate: float | None = derived("1 / first", "Rate.", at_least=0.0)
        on: bool = flag("Off.", "--no-on", "--off", default=True, negative=True)
        plain: int = 3

    namespace = types.SimpleNamespace(**{s.dest: s for s in flag_specs(Group, "g", "title")})
    assert not hasattr(namespace, "plain")
    assert namespace.first_size.names == ("--first-size",)
    assert namespace.first_size.required
    assert namespace.names.is_list and namespace.names.value_type is str
    assert namespace.rate.value_type is float and namespace.rate.default_rule == "1 / first"
    assert namespace.on.names == ("--no-on", "--off") and not namespace.on.takes_value
    assert (namespace.on.group, namespace.on.section) == ("g", "title")
