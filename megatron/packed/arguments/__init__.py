"""The command line and the typed configuration it is read into.

The frozen dataclasses are the truth; the parser, the help text and the reports are generated from
them. Nothing here imports torch or megatron-core, so `--help` and a bad flag answer at once.

    config = validate(parse_arguments(sys.argv[1:], os.environ), accelerator="cpu")
"""

from __future__ import annotations

from megatron.packed.arguments.config import Config, Replacement, all_specs, build_config
from megatron.packed.arguments.config_file import ConfigFileError
from megatron.packed.arguments.data import DataConfig, LoggingConfig, PackingConfig
from megatron.packed.arguments.declare import FlagSpec
from megatron.packed.arguments.from_checkpoint import with_checkpoint_arguments
from megatron.packed.arguments.model import KernelConfig, ModelConfig
from megatron.packed.arguments.parallel import ParallelConfig, RuntimeConfig
from megatron.packed.arguments.parser import CommandLineError, build_parser, parse_arguments
from megatron.packed.arguments.report import config_report, replacement_report
from megatron.packed.arguments.shorthand import config_from_flags, override
from megatron.packed.arguments.training import (
    EvaluationConfig,
    OptimizationConfig,
    TrainingConfig,
)
from megatron.packed.arguments.validation import validate

__all__ = [
    "CommandLineError",
    "Config",
    "ConfigFileError",
    "DataConfig",
    "EvaluationConfig",
    "FlagSpec",
    "KernelConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizationConfig",
    "PackingConfig",
    "ParallelConfig",
    "Replacement",
    "RuntimeConfig",
    "TrainingConfig",
    "all_specs",
    "build_config",
    "build_parser",
    "config_from_flags",
    "config_report",
    "override",
    "parse_arguments",
    "replacement_report",
    "validate",
    "with_checkpoint_arguments",
]
