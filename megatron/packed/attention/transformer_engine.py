"""TransformerEngine's own attention under context parallelism, as a core attention.

`--attention-backend fused` on CUDA chooses it, where the table of capabilities says that it can do
what is asked; the batches are those of our own engine. What it is told, because it would otherwise
guess wrong:

- boundaries are the whole pack's, and it divides them by the ranks itself;
- real and padded ones are two tensors, and `pad_between_seqs` is said: from one tensor it takes
  `cu_seqlens // cp` for a rank's real tokens, which is wrong for lengths that aren't multiples;
- `max_seqlen` is a multiple of 2 * CP, since it is divided, too.

Rows that hold no token are set to zero afterwards: it leaves there what it finds.

Source: `transformer_engine/pytorch/attention/dot_product_attention` (2.x), and megatron-core's
wrapper `TEDotProductAttention`, which has no word for `pad_between_seqs`.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.packed.attention.core_attention import check_supported, layer_window
from megatron.packed.errors import ConfigurationError

PACKAGE = "transformer_engine"
# It plans kernels anew for every longest sequence: rounded up, packs share them.
LENGTH_STEP = 64


def is_installed() -> bool:
    """Whether the package is there; nothing of it is imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def _engine() -> Callable[..., Any]:
    """Its attention module.

    Raises:
        ConfigurationError: if it isn't installed.
    """
    try:
        module = importlib.import_module(f"{PACKAGE}.pytorch")
    except ImportError as error:
        raise ConfigurationError(
            f"--attention-backend fused: the package {PACKAGE} can't be imported ({error}); "
            "install megatron-packed[gpu], or use --attention-backend flash"
        ) from error
    return module.DotProductAttention


class TransformerEngineCoreAttention(MegatronModule):
    """`DotProductAttention` of TransformerEngine over packs and rows that ranks share by zigzag.

    Args:
        config: Transformer configuration.
        layer_number: Global 1-based layer number.
        attn_mask_type: ``causal`` or ``padding_causal``.
        attention_type: ``self``.
        attention_dropout: Overrides ``config.attention_dropout``; only 0 is possible.
        softmax_scale: Overrides ``1/sqrt(d)``.
        cp_comm_type: Accepted for the contract; core reads a list of one a layer off by one.
        pg_collection: Gives the tensor- and context-parallel groups, by default megatron-core's.
        k_channels: Width of a query and key head, where it is not ``config.kv_channels``.
        v_channels: Width of a value head, where it is another one.
        exchanges: ``p2p``, ``all_gather`` or ``a2a`` for all layers, or one a layer of the model.
        **unused: Keywords that later megatron-core versions pass. One that is set is refused.

    Raises:
        ConfigurationError: If TransformerEngine isn't installed, or can't compute what is asked.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        exchanges: Sequence[str] = ("p2p",),
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        engine = _engine()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        check_supported(config, attn_mask_type, attention_type, dropout, unused)
        if config.softmax_type != "vanilla":
            raise ConfigurationError(
                f"--softmax-type {config.softmax_type}: TransformerEngine's attention is used with "
                "the plain softmax alone; use --attention-backend flash"
            )
        tp_group = getattr(pg_collection, "tp", None)
        cp_group = getattr(pg_collection, "cp", None)
        if tp_group is None:
            tp_group = parallel_state.get_tensor_model_parallel_group()
        if cp_group is None:
            cp_group = parallel_state.get_context_parallel_group()
        # Layers of multi-token prediction count on, and attend like the last one of the decoder.
        self.layer_number = min(max(1, layer_number), config.num_layers)
        self._cp_size = config.context_parallel_size
        kind = exchanges[0] if len(exchanges) == 1 else exchanges[self.layer_number - 1]
        window = layer_window(config.window_size, config.window_attn_skip_freq, self.layer_number)
        if window is not None and kind == "p2p":
            raise ConfigurationError(
                "--window-size: TransformerEngine's attention has no sliding window with "
                "--cp-comm-type p2p; use all_gather or a2a, or --attention-backend flash"
            )
        width = k_channels or config.kv_channels
        self._attend = engine(
            num_attention_heads=config.num_attention_heads,
            kv_channels=width if v_channels in (None, width) else (width, v_channels),
            num_gqa_groups=config.num_query_groups,
            attention_dropout=0.0,
            attn_mask_type="causal",
            window_size=None if window is None else (window, 0),
            sequence_parallel=config.sequence_parallel,
            tp_size=config.tensor_model_parallel_size,
            tp_group=tp_group,
            get_rng_state_tracker=None,
            layer_number=self.layer_number,
            attention_type="self",
            softmax_scale=softmax_scale,
            cp_group=cp_group,
            cp_global_ranks=dist.get_process_group_ranks(cp_group),
            cp_stream=_stream(),
            cp_comm_type=kind,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> Tensor:
        """Attend; arguments and result as those of `PackedCoreAttention`.

        Raises:
            ValueError: If a bias or row boundaries are passed.
        """
        if attention_bias is not None or attention_mask is not None:
            raise ValueError("attention_bias, attention_mask: neither goes with this engine")
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            return self._attend(query, key, value, None, qkv_format="sbhd", attn_mask_type="causal")
        out = self._attend(query, key, value, None, **_boundaries(packed_seq_params, self._cp_size))
        valid = packed_seq_params.valid_local_token_mask.view(-1, 1)
        return torch.where(valid, out, 0.0)


def _boundaries(params: Any, cp_size: int) -> dict[str, Any]:
    """What the engine is told of a pack."""
    real, padded = params.cu_seqlens_q, params.cu_seqlens_q_padded
    if padded is None or padded is real:
        padded = real.clone()  # one tensor for both would mean: nothing is padded
    step = math.lcm(LENGTH_STEP, 2 * cp_size)
    longest = -(-int(params.max_seqlen_q) // step) * step
    return {
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
        "cu_seqlens_q": real,
        "cu_seqlens_kv": real,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "pad_between_seqs": True,
    }


@lru_cache
def _stream() -> Any:
    """The one stream that all layers of this process exchange on; None without CUDA."""
    return torch.cuda.Stream() if torch.cuda.is_available() else None
