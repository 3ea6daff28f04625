"""`Config`: the one typed, frozen record of a run, and how it is built from flat values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.packed.arguments.acceleration import AccelerationConfig
from megatron.packed.arguments.attention import AttentionConfig
from megatron.packed.arguments.checkpoint import CheckpointConfig
from megatron.packed.arguments.core import build_core_group, given_core_values
from megatron.packed.arguments.data import DataConfig, LoggingConfig, PackingConfig
from megatron.packed.arguments.declare import FlagSpec, flag_specs
from megatron.packed.arguments.elsewhere import ElsewhereConfig
from megatron.packed.arguments.faults import FaultsConfig
from megatron.packed.arguments.heterogeneous import HeterogeneousConfig
from megatron.packed.arguments.linear_attention import LinearAttentionConfig
from megatron.packed.arguments.loss import LossConfig
from megatron.packed.arguments.model import KernelConfig, ModelConfig
from megatron.packed.arguments.moe import MoEConfig
from megatron.packed.arguments.optimizer import OptimizerConfig
from megatron.packed.arguments.parallel import ParallelConfig, RuntimeConfig
from megatron.packed.arguments.pipeline import PipelineConfig
from megatron.packed.arguments.schedule import ScheduleConfig
from megatron.packed.arguments.sft import FineTuningConfig
from megatron.packed.arguments.training import (
    EvaluationConfig,
    OptimizationConfig,
    TrainingConfig,
)
from megatron.packed.arguments.without_effect import WithoutEffectConfig
from megatron.packed.errors import ConfigurationError

COMMAND_LINE = "command line"
CONFIG_FILE = "config file"
ENVIRONMENT = "environment"
DERIVED = "derived"
REPLACED = "replaced"
DEFAULT = "default"


@dataclass(frozen=True)
class Replacement:
    """One row of the start-up table: what was asked for, what is used, and why.

    Attributes:
        flag: The flag as documented.
        asked: The value asked for, as text.
        used: What runs instead, as text.
        why: One clause.
        exact_spelling: The same setting under another name: nothing is replaced.
    """

    flag: str
    asked: str
    used: str
    why: str
    exact_spelling: bool = False


HAND_WRITTEN: Mapping[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "training": TrainingConfig,
    "optimization": OptimizationConfig,
    "optimizer_options": OptimizerConfig,
    "data": DataConfig,
    "packing": PackingConfig,
    "evaluation": EvaluationConfig,
    "logging": LoggingConfig,
    "kernels": KernelConfig,
    "runtime": RuntimeConfig,
    "attention": AttentionConfig,
    "linear_attention": LinearAttentionConfig,
    "heterogeneous": HeterogeneousConfig,
    "moe": MoEConfig,
    "pipeline": PipelineConfig,
    "schedule": ScheduleConfig,
    "checkpoint": CheckpointConfig,
    "faults": FaultsConfig,
    "loss": LossConfig,
    "sft": FineTuningConfig,
    "acceleration": AccelerationConfig,
    "elsewhere": ElsewhereConfig,
    "without_effect": WithoutEffectConfig,
}
CoreConfig = build_core_group(HAND_WRITTEN)
CoreConfig.__module__ = __name__  # where pickle finds it


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run is told, in groups of frozen dataclasses.

    Between `parse_arguments` and `validate`, fields declared with `derived` may still be None;
    in a validated config all of them hold a value.

    Attributes:
        core: Settings that megatron-core declares and no other group does; see `core_values`.
        given: What the user and the launcher set, by field name, before anything is derived.
        sources: Where the value of a field came from (`command line`, `config file`,
            `environment`, `derived`, `replaced`), by field name; absent means its default.
        replacements: What `validate` replaced by an equivalent, and why.
    """

    model: ModelConfig
    parallel: ParallelConfig
    training: TrainingConfig
    optimization: OptimizationConfig
    optimizer_options: OptimizerConfig
    data: DataConfig
    packing: PackingConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig
    kernels: KernelConfig
    runtime: RuntimeConfig
    attention: AttentionConfig
    moe: MoEConfig
    pipeline: PipelineConfig
    schedule: ScheduleConfig
    checkpoint: CheckpointConfig
    faults: FaultsConfig
    loss: LossConfig
    sft: FineTuningConfig
    linear_attention: LinearAttentionConfig
    heterogeneous: HeterogeneousConfig
    acceleration: AccelerationConfig
    elsewhere: ElsewhereConfig
    without_effect: Any
    core: Any
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    replacements: tuple[Replacement, ...] = field(default=(), compare=False, repr=False)

    def get(self, dest: str) -> Any:
        """Return the value of a field by its name, whichever group it is in."""
        return getattr(getattr(self, spec_of(dest).group), dest)

    def is_given(self, dest: str) -> bool:
        """Return whether the user or the launcher set a field."""
        return dest in self.given

    def with_values(self, values: Mapping[str, Any], source: str | None = None) -> Config:
        """Return a copy with some fields set, nothing derived or checked again.

        Args:
            values: New values by field name.
            source: Recorded as where they came from; None keeps the record as it is.
        """
        groups: dict[str, Any] = {}
        for dest, value in values.items():
            groups.setdefault(spec_of(dest).group, {})[dest] = value
        changed = {
            group: dataclasses.replace(getattr(self, group), **fields)
            for group, fields in groups.items()
        }
        sources = {**self.sources, **({d: source for d in values} if source else {})}
        return dataclasses.replace(self, **changed, sources=sources)

    def core_values(self, accepted: Iterable[str]) -> dict[str, Any]:
        """Return what the user set of megatron-core's own settings, for one of its configs.

        Args:
            accepted: Field names of the config that is built.
        """
        return given_core_values(all_specs().values(), self.given, self.core, accepted)

    @property
    def device_type(self) -> str:
        """`cuda` or `cpu`; known once the config is validated with an accelerator."""
        if self.runtime.accelerator == "auto":
            raise ConfigurationError(
                "--accelerator auto isn't resolved yet: pass validate() what it means here"
            )
        return self.runtime.accelerator


@functools.cache
def config_groups() -> Mapping[str, type]:
    """Return the dataclass of each group by its attribute name on `Config`."""
    return {**HAND_WRITTEN, "core": CoreConfig}


@functools.cache
def all_specs() -> Mapping[str, FlagSpec]:
    """Return every declared field by name, in order of declaration.

    Raises:
        TypeError: Two fields share a name or a flag, so a flat value couldn't be placed.
    """
    specs: dict[str, FlagSpec] = {}
    flags: dict[str, str] = {}
    for group, group_class in config_groups().items():
        for spec in flag_specs(group_class, group, group_class.SECTION):  # type: ignore[attr-defined]
            if spec.dest in specs:
                raise TypeError(f"field {spec.dest} is declared in two config groups")
            for name in spec.names:
                if name in flags:
                    raise TypeError(f"{name} is declared by {flags[name]} and {spec.dest}")
                flags[name] = spec.dest
            specs[spec.dest] = spec
    return specs


def spec_of(dest: str) -> FlagSpec:
    """Return the declaration of a field.

    Raises:
        ConfigurationError: No field has that name.
    """
    try:
        return all_specs()[dest]
    except KeyError:
        raise ConfigurationError(f"no config field is called {dest!r}") from None


def build_config(
    values: Mapping[str, Any], sources: Mapping[str, str], *, complete: bool = True
) -> Config:
    """Build a config from flat values; fields not among them take their defaults.

    Whatever reads settings (the command line, a file, a checkpoint) ends here.

    Args:
        values: Values by field name, of the fields' own types.
        sources: Where each came from, by field name.
        complete: Refuse to build while required ones are missing; else they are None, for a
            checkpoint to fill in.

    Raises:
        ConfigurationError: A field is unknown, or required ones are missing: all are listed.
    """
    groups: dict[str, dict[str, Any]] = {group: {} for group in config_groups()}
    for dest, value in values.items():
        groups[spec_of(dest).group][dest] = value
    missing = [
        spec
        for spec in all_specs().values()
        if spec.required
        and values.get(spec.dest) is None
        and (spec.instead is None or values.get(spec.instead) is None)
    ]
    if missing and not complete:
        for spec in missing:
            groups[spec.group][spec.dest] = None
    elif missing:
        names = ", ".join(spec.name for spec in missing)
        raise ConfigurationError(
            f"missing: {names}; a run needs {'them' if missing[1:] else 'it'}, there is no default"
        )
    built = {name: cls(**groups[name]) for name, cls in config_groups().items()}
    return Config(**built, given=dict(values), sources=dict(sources))
