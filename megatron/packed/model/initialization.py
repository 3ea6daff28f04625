"""Initial weights as a pure function of (seed, global parameter name, element index).

Every rank computes exactly its own elements with a counter-based generator, so a tensor-parallel
shard, a pipeline stage and a lone process start from the same model without exchanging a byte.
The distributions are upstream's: normal(0, std) for weights, normal(0, std / sqrt(2 * layers))
for the projections that write to the residual stream, zeros for biases, ones for norms; or
Xavier's uniform one for all weights, by the fans of the whole parameter.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.packed.accelerator.compat import lasting_name

_LAYER = re.compile(r"(?P<prefix>.*\bdecoder\.layers\.)(?P<number>\d+)(?P<rest>\..*)")
# Experts as `SequentialMLP` and as TransformerEngine's grouped layers name them.
_EXPERT = re.compile(
    r"(?P<prefix>.*\bmlp\.experts\.)"
    r"(?:local_experts\.(?P<each>\d+)\.(?P<rest>.*)"
    r"|(?P<grouped>linear_fc[12]\.(?:weight|bias))(?P<number>\d+))"
)
_ROUTER_BIAS = "router.bias"
# A recurrent layer's filters and decay rates, which upstream draws uniformly.
_CONVOLUTION = "self_attention.conv_weight"
_DECAY = "self_attention.A_log"
# Projections whose output is added to the residual stream (upstream: output_layer_init_method).
_RESIDUAL_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")
_WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
_OUTPUT_LAYER = "output_layer.weight"
# The learned score of attention's sink, one number a head; other vectors are biases and gains.
_SINKS = "core_attention.softmax_offset"
# Elements generated at a time: bounds the int64 temporaries to a few MiB.
_CHUNK = 1 << 18

# Constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
# 2014), as signed 64-bit integers because torch has no unsigned arithmetic.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class InitializationConfig:
    """What the initial weights depend on.

    Attributes:
        seed: `--seed`.
        std: `--init-method-std`.
        num_layers: layers of the whole model (scales the residual projections).
        gated_linear_unit: fc1 holds gate and up projections, interleaved per tensor-parallel rank.
        tp_rank: tensor-parallel rank of this process.
        tp_size: tensor-parallel size.
        expert_tp_rank: rank of this process among those that share an expert's weights.
        expert_tp_size: processes that share an expert's weights.
        first_expert: number of this process's first expert in its layer.
        vocab_size: real ids; the vocabulary's padding rows, whose number depends on `tp_size`,
            start at zero and stay there.
        embedding_std: `--embedding-init-method-std`; None for `std`.
        xavier: `--init-method-xavier-uniform`.
        width_mult: of maximal update parameterisation, hidden size over that of the base model.
    """

    seed: int
    std: float
    num_layers: int
    gated_linear_unit: bool
    tp_rank: int
    tp_size: int
    vocab_size: int
    expert_tp_rank: int = 0
    expert_tp_size: int = 1
    first_expert: int = 0
    embedding_std: float | None = None
    xavier: bool = False
    width_mult: float = 1.0

    def shard(self, name: str) -> tuple[int, int]:
        """Rank and size of the group that a parameter is split over.

        Args:
            name: the parameter's, in the whole model or on this rank.
        """
        if is_routed_expert(name):
            return self.expert_tp_rank, self.expert_tp_size
        return self.tp_rank, self.tp_size


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift of int64 bit patterns."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _splitmix64(counters: torch.Tensor) -> torch.Tensor:
    """Hash int64 counters to 64 random bits each."""
    bits = counters * _GAMMA
    bits = (bits ^ _shift_right(bits, 30)) * _MIX1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX2
    return bits ^ _shift_right(bits, 31)


def stream_key(seed: int, name: str) -> int:
    """A 63-bit key for the stream of one parameter, stable across Python versions."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def counter_normal(key: int, indices: torch.Tensor, std: float) -> torch.Tensor:
    """Normal variates addressed by index.

    Args:
        key: stream of the parameter, see `stream_key`.
        indices: int64, any shape: element indices in the whole (unsharded) parameter.
        std: standard deviation.

    Returns:
        float32 of the shape of `indices`; equal indices give equal values, always.
    """
    bits = _splitmix64(indices + _splitmix64(torch.tensor(key, device=indices.device)))
    # Box-Muller on two 32-bit halves; the half-step offset keeps log() away from zero.
    first = (_shift_right(bits, 32).double() + 0.5) * 2.0**-32
    second = (bits & 0xFFFFFFFF).double() * 2.0**-32
    radius = torch.sqrt(torch.log(first).mul_(-2.0))
    return (radius * torch.cos(second.mul_(2.0 * math.pi)) * std).float()


def counter_uniform(key: int, indices: torch.Tensor, bound: float) -> torch.Tensor:
    """Variates uniform between -bound and bound, addressed by index as those of `counter_normal`.

    Args:
        key: stream of the parameter, see `stream_key`.
        indices: int64, any shape: element indices in the whole (unsharded) parameter.
        bound: largest magnitude.
    """
    bits = _splitmix64(indices + _splitmix64(torch.tensor(key, device=indices.device)))
    share = (_shift_right(bits, 32).double() + 0.5) * 2.0**-32
    return ((2.0 * share - 1.0) * bound).float()


def is_routed_expert(name: str) -> bool:
    """Whether a parameter belongs to one of the experts that a router chooses from."""
    return _EXPERT.fullmatch(name) is not None


def global_parameter_name(name: str, layer_offset: int, first_expert: int = 0) -> str:
    """The name that a parameter has in the whole model, whichever module computes it.

    Args:
        name: name within this pipeline stage's GPTModel.
        layer_offset: decoder layers held by earlier stages.
        first_expert: experts of each layer held by earlier ranks.
    """
    name = lasting_name(name)
    match = _LAYER.fullmatch(name)
    if match is not None:
        name = f"{match['prefix']}{int(match['number']) + layer_offset}{match['rest']}"
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    number = int(match["each"] or match["number"]) + first_expert
    return f"{match['prefix']}local_experts.{number}.{match['rest'] or match['grouped']}"


def _global_rows(
    name: str, parameter: torch.Tensor, dim: int, config: InitializationConfig
) -> torch.Tensor:
    """Indices, along the partitioned dimension, of this rank's slices in the whole parameter."""
    local = parameter.shape[dim]
    rank, size = config.shard(name)
    if config.gated_linear_unit and "linear_fc1" in name:
        half = local // 2
        gate = torch.arange(half) + rank * half
        return torch.cat((gate, gate + half * size))
    return torch.arange(local) + rank * local


def _element_index_chunks(
    name: str, parameter: torch.Tensor, config: InitializationConfig
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first local row, global element indices of these rows) over a parameter [rows, -1]."""
    rows, columns = parameter.shape[0], parameter[0].numel()
    row_index, column_index, width = torch.arange(rows), torch.arange(columns), columns
    if getattr(parameter, "tensor_model_parallel", False):
        if parameter.partition_dim == 0:
            row_index = _global_rows(name, parameter, 0, config)
        else:
            column_index = _global_rows(name, parameter, 1, config)
            width = columns * config.shard(name)[1]
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        block = row_index[start : start + step]
        yield start, block[:, None] * width + column_index[None, :]


def weight_std(name: str, config: InitializationConfig) -> float:
    """Standard deviation of a weight, as upstream's init methods set it.

    Args:
        name: its name in the whole model.
        config: what the weights depend on.
    """
    embedding_std = config.std if config.embedding_std is None else config.embedding_std
    if name.startswith("embedding."):
        return embedding_std
    if name == _OUTPUT_LAYER:
        return config.std if config.width_mult == 1.0 else embedding_std
    std = config.std / math.sqrt(config.width_mult)
    if name.endswith(_RESIDUAL_PROJECTIONS):
        return std / math.sqrt(2.0 * config.num_layers)
    return std


def xavier_bound(name: str, parameter: torch.Tensor, config: InitializationConfig) -> float | None:
    """Largest magnitude of a weight of Xavier's uniform distribution; None for a normal one.

    Args:
        name: its name in the whole model.
        parameter: this rank's shard.
        config: what the weights depend on.

    Source: Glorot and Bengio 2010.
    """
    other_std = config.embedding_std not in (None, config.std)
    if not config.xavier or parameter.dim() < 2 or (name.startswith("embedding.") and other_std):
        return None
    fans = [parameter.shape[0], parameter[0].numel()]
    if getattr(parameter, "tensor_model_parallel", False):
        fans[1 if parameter.partition_dim else 0] *= config.shard(name)[1]
    if name in (_WORD_EMBEDDINGS, _OUTPUT_LAYER):
        fans[0] = config.vocab_size
    return math.sqrt(6.0 / sum(fans))


def _values(
    name: str, parameter: torch.Tensor, indices: torch.Tensor, config: InitializationConfig
) -> torch.Tensor:
    """Elements of a parameter, from the distribution that upstream gives it."""
    key = stream_key(config.seed, name)
    if name.endswith(_CONVOLUTION):
        return counter_uniform(key, indices, parameter.shape[1] ** -0.5)
    if name.endswith(_DECAY):
        return (8.5 + counter_uniform(key, indices, 7.5)).log()  # of 1 to 16
    bound = xavier_bound(name, parameter, config)
    if bound is not None:
        return counter_uniform(key, indices, bound)
    return counter_normal(key, indices, weight_std(name, config))


@torch.no_grad()
def initialize_weights(
    model: torch.nn.Module, config: InitializationConfig, layer_offset: int = 0
) -> None:
    """Fill every weight matrix of a pipeline stage; norm parameters keep 1, biases 0.

    The bias of a router is drawn as a weight is, as upstream does.

    Args:
        model: a GPTModel (one pipeline stage, unwrapped).
        config: what the weights depend on.
        layer_offset: decoder layers held by earlier pipeline stages.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 and not name.endswith((_ROUTER_BIAS, _SINKS, _DECAY)):
            continue
        whole_name = global_parameter_name(name, layer_offset, config.first_expert)
        if whole_name == _OUTPUT_LAYER and getattr(parameter, "shared_embedding", False):
            # The last stage's copy of tied embeddings.
            whole_name = _WORD_EMBEDDINGS
        matrix = parameter.view(parameter.shape[0], -1)
        for start, indices in _element_index_chunks(name, parameter, config):
            values = _values(whole_name, parameter, indices.to(parameter.device), config)
            matrix[start : start + indices.shape[0]].copy_(values)
        if whole_name in (_WORD_EMBEDDINGS, _OUTPUT_LAYER):
            first = config.tp_rank * matrix.shape[0]
            matrix[max(0, config.vocab_size - first) :].zero_()
