"""Models whose layers differ: each layer's attention and feed-forward part by a file's word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megatron.packed.arguments.declare import flag
from megatron.packed.errors import ConfigurationError
from megatron.packed.json_text import parse_json


@dataclass(frozen=True)
class LayerShape:
    """One layer.

    Attributes:
        attention: whether it has attention.
        linear_attention: one linear layer in its place.
        query_groups: key-value heads of its attention; None for the model's.
        feed_forward: whether it has a feed-forward layer.
        linear_feed_forward: one linear layer in its place.
        ffn_hidden_size: width of its feed-forward layer; None for the model's.
    """

    attention: bool
    linear_attention: bool
    query_groups: int | None
    feed_forward: bool
    linear_feed_forward: bool
    ffn_hidden_size: int | None


@dataclass(frozen=True, kw_only=True)
class HeterogeneousConfig:
    """Where the shapes of layers that differ are written."""

    SECTION: ClassVar[str] = "heterogeneous layers"

    heterogeneous_layers_config_path: str | None = flag(
        "JSON file with the attention and feed-forward shape of every layer (block_configs), as in "
        "Hugging Face's files of Llama-Nemotron models."
    )
    heterogeneous_layers_config_encoded_json: str | None = flag(
        "The text of such a file itself; it goes before the path."
    )

    @property
    def text(self) -> str | None:
        """The JSON text; None for a model of equal layers.

        Raises:
            ConfigurationError: the file can't be read.
        """
        if self.heterogeneous_layers_config_encoded_json:
            return self.heterogeneous_layers_config_encoded_json
        if self.heterogeneous_layers_config_path is None:
            return None
        try:
            return Path(self.heterogeneous_layers_config_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"can't be read: {error}") from None

    @property
    def source(self) -> str:
        """The flag that is asked, for messages."""
        if self.heterogeneous_layers_config_encoded_json:
            return "--heterogeneous-layers-config-encoded-json"
        return f"--heterogeneous-layers-config-path {self.heterogeneous_layers_config_path}"

    def document(self) -> Mapping[str, Any] | None:
        """What the file says of the model; None for a model of equal layers.

        Raises:
            ConfigurationError: it isn't a JSON object with a list of `block_configs`.
        """
        text = self.text
        if text is None:
            return None
        try:
            document = parse_json(text)
        except ValueError as error:
            raise ConfigurationError(f"must be JSON: {error}") from None
        if not isinstance(document, dict) or not isinstance(document.get("block_configs"), list):
            raise ConfigurationError("must hold a list block_configs, one entry for each layer")
        return document

    def layers(self, hidden_size: int, heads: int) -> tuple[LayerShape, ...] | None:
        """The shape of every layer; None for a model of equal layers.

        Args:
            hidden_size: of the model.
            heads: attention heads of the model.

        Raises:
            ConfigurationError: for an entry that can't be read; it is named.
        """
        document = self.document()
        if document is None:
            return None
        shapes = []
        for number, block in enumerate(document["block_configs"], 1):
            try:
                shapes.append(_shape(block, hidden_size, heads))
            except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
                raise ConfigurationError(
                    f"layer {number} of block_configs: {error}; it must have an attention with "
                    "n_heads_in_group or num_query_groups, and an ffn with ffn_mult or "
                    "ffn_hidden_size, null where no_op or replace_with_linear is true"
                ) from None
        return tuple(shapes)


def _shape(block: Mapping[str, Any], hidden_size: int, heads: int) -> LayerShape:
    attention, mlp = block["attention"], block.get("ffn") or block["mlp"]
    if "num_query_groups" in attention:
        groups = attention["num_query_groups"]
    else:
        in_group = attention["n_heads_in_group"]
        if in_group is not None and heads % in_group:
            raise ValueError(f"n_heads_in_group {in_group} doesn't divide {heads} attention heads")
        groups = None if in_group is None else heads // in_group
    if "ffn_hidden_size" in mlp:
        width = mlp["ffn_hidden_size"]
    else:
        mult = mlp["ffn_mult"]
        # The rounding of the files' own code, up to multiples of 256.
        width = None if mult is None else -(-int(2 * mult * hidden_size / 3) // 256) * 256
    for name, part in (("attention", attention), ("ffn", mlp)):
        for switch in ("no_op", "replace_with_linear"):
            if not isinstance(part.get(switch, False), bool | None):
                raise ValueError(f"{switch} of the {name} is {part[switch]!r}, not true or false")
    shape = LayerShape(
        attention=not attention.get("no_op", False),
        linear_attention=bool(attention.get("replace_with_linear", False)),
        query_groups=groups,
        feed_forward=not mlp.get("no_op", False),
        linear_feed_forward=bool(mlp.get("replace_with_linear", False)),
        ffn_hidden_size=width,
    )
    for present, linear, size, name in (
        (shape.attention, shape.linear_attention, groups, "attention"),
        (shape.feed_forward, shape.linear_feed_forward, width, "ffn"),
    ):
        if not present and linear:
            raise ValueError(f"the {name} is both no_op and replace_with_linear")
        if size is not None and (not present or linear):
            raise ValueError(f"the {name} has a size, but there is none")
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"the {name} has size {size!r}")
    return shape
