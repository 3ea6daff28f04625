"""The model's shape, its regularisation and how its weights start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import Replaced, derived, flag, required

EXACT_ATTENTION = "exact flash attention per segment"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that decides which function the model computes."""

    SECTION: ClassVar[str] = "network size"

    num_layers: int = required("Number of transformer layers.", at_least=1, at_most=100_000)
    hidden_size: int = required("Width of the residual stream.", at_least=1)
    ffn_hidden_size: int = derived(
        "4 * hidden size, or with --swiglu int(4 * hidden size * 2 / 3 / 64) * 64",
        "Width of the feed-forward layer.",
        at_least=1,
    )
    num_attention_heads: int = required("Number of attention heads.", at_least=1)
    group_query_attention: bool = flag(
        "Share keys and values among groups of heads.", default=False
    )
    num_query_groups: int = derived(
        "1 with --group-query-attention, else one for each attention head",
        "Number of key/value heads with --group-query-attention.",
        at_least=1,
    )
    kv_channels: int = derived(
        "hidden size / attention heads", "Channels of one attention head.", at_least=1
    )
    max_position_embeddings: int = derived(
        "--seq-length", "Rows of the position table; no sequence may be longer.", at_least=1
    )
    position_embedding_type: str = flag(
        "How positions enter the model.",
        default="learned_absolute",
        choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    )
    use_rotary_position_embeddings: bool = flag(
        "Older spelling of --position-embedding-type rope.", default=False
    )
    rotary_base: int = flag("Base of the rotary frequencies.", default=10000, at_least=1)
    rotary_percent: float = flag(
        "Share of each head's channels that is rotated.", default=1.0, above=0.0, at_most=1.0
    )
    rotary_interleaved: bool = flag("Rotate neighbouring channels, not halves.", default=False)
    rotary_seq_len_interpolation_factor: int | None = flag(
        "Divide rotary positions by this factor.", at_least=1
    )
    use_rope_scaling: bool = flag("Scale rotary frequencies as Llama 3 does.", default=False)
    rope_scaling_factor: float = flag("Factor of --use-rope-scaling.", default=8.0, above=0.0)
    normalization: str = flag(
        "Kind of normalisation.", default="LayerNorm", choices=("LayerNorm", "RMSNorm")
    )
    norm_epsilon: float = flag("Epsilon of the normalisation.", default=1e-5, above=0.0)
    apply_layernorm_1p: bool = flag(
        "Store the norm's weights centred around zero, that is minus 1.", default=False
    )
    swiglu: bool = flag("Gated feed-forward layer with SiLU in place of GeLU.", default=False)
    squared_relu: bool = flag("Squared ReLU in place of GeLU.", default=False)
    quick_geglu: bool = flag(
        "Gated feed-forward layer with the quick GeLU x * sigmoid(1.702 x).", default=False
    )
    glu_linear_offset: float = flag("Added to the linear half of --quick-geglu.", default=0.0)
    activation_func_clamp_value: float | None = flag(
        "Clamp both halves of --quick-geglu to this magnitude.", above=0.0
    )
    add_bias_linear: bool = flag(
        "No biases in linear layers.", "--disable-bias-linear", default=True, negative=True
    )
    add_qkv_bias: bool = flag(
        "Bias in the QKV projection, also with --disable-bias-linear.", default=False
    )
    qk_layernorm: bool = flag("Normalise queries and keys of each head.", default=False)
    untie_embeddings_and_output_weights: bool = flag(
        "Give the output layer weights of its own.", default=False
    )
    make_vocab_size_divisible_by: int = flag(
        "Pad the vocabulary to a multiple of this times the tensor-parallel size.",
        default=128,
        at_least=1,
    )
    apply_residual_connection_post_layernorm: bool = flag(
        "Take the residual from after the layer norm.",
        default=False,
        refused="megatron-core's GPT layers always take the residual from before the norm",
    )

    attention_backend: str = flag(
        "Attention engine.",
        default="auto",
        choices=("flash", "flash2", "fused", "unfused", "local", "auto", "flex", "magi"),
        replaced=Replaced("a CPU has one attention engine, exact for all of them", EXACT_ATTENTION),
    )
    transformer_impl: str = flag(
        "Which implementation of the layers to use.",
        default="transformer_engine",
        choices=("transformer_engine", "local"),
        replaced=Replaced("TransformerEngine needs CUDA", "local", value="local"),
    )
    attention_softmax_in_fp32: bool = flag(
        "Softmax of attention in fp32.",
        default=False,
        section="mixed precision",
        replaced=Replaced("attention always accumulates in fp32", EXACT_ATTENTION),
    )
    apply_query_key_layer_scaling: bool = flag(
        "Scale attention scores down by the layer number and up again inside the softmax.",
        default=False,
        section="mixed precision",
        replaced=Replaced(
            "the two scalings cancel when the softmax is in fp32, as it is", EXACT_ATTENTION, False
        ),
    )
    fp32_residual_connection: bool = flag(
        "Keep the residual stream in fp32 when training in bf16.",
        default=False,
        section="mixed precision",
    )

    attention_dropout: float = flag(
        "Dropout on attention probabilities.",
        default=0.1,
        section="regularization",
        at_least=0.0,
        below=1.0,
    )
    hidden_dropout: float = flag(
        "Dropout on the residual branches.",
        default=0.1,
        section="regularization",
        at_least=0.0,
        below=1.0,
    )
    init_method_std: float = flag(
        "Standard deviation of the normal distribution weights start from.",
        default=0.02,
        section="initialization",
        above=0.0,
    )
    embedding_init_method_std: float | None = flag(
        "That of the embeddings, where it differs.", section="initialization", above=0.0
    )
    init_method_xavier_uniform: bool = flag(
        "Start weights from Xavier's uniform distribution.", default=False, section="initialization"
    )

    use_mup: bool = flag(
        "Maximal update parameterisation: rates and scales follow the width over a base model's.",
        default=False,
        section="maximal update parameterisation",
    )
    mup_base_hidden_size: int | None = flag(
        "Hidden size of the base model; by default this one's.",
        section="maximal update parameterisation",
        at_least=1,
    )
    mup_embedding_mult: float = flag(
        "Multiplies the embeddings.", default=1.0, section="maximal update parameterisation"
    )
    mup_output_mult: float = flag(
        "Multiplies the logits; 1 stands for base width over width.",
        default=1.0,
        section="maximal update parameterisation",
    )
    mup_base_head_dim: float | None = flag(
        "Channels of the base model's heads, whose 1/sqrt(d) the scores keep.",
        section="maximal update parameterisation",
        above=0.0,
    )
    mup_attn_scale_power: float = flag(
        "Scores are divided by the channels of a head to this power.",
        default=1.0,
        section="maximal update parameterisation",
    )

    @property
    def width_mult(self) -> float:
        """Hidden size over that of the base model; 1 without maximal update parameterisation."""
        if not self.use_mup or self.mup_base_hidden_size is None:
            return 1.0
        return self.hidden_size / self.mup_base_hidden_size

    @property
    def logit_multiplier(self) -> float:
        """Factor of the logits with maximal update parameterisation."""
        return 1.0 / self.width_mult if self.mup_output_mult == 1.0 else self.mup_output_mult

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate beside its linear half."""
        return self.swiglu or self.quick_geglu


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Choices of GPU kernels that compute the same function faster; launch scripts carry them."""

    SECTION: ClassVar[str] = "kernels"

    gradient_accumulation_fusion: bool = flag(
        "Do not accumulate weight gradients inside the GEMM.",
        "--no-gradient-accumulation-fusion",
        default=True,
        negative=True,
        replaced=Replaced("the fused kernel needs CUDA", "a separate addition", False),
    )
    masked_softmax_fusion: bool = flag(
        "Do not fuse scaling, masking and softmax.",
        "--no-masked-softmax-fusion",
        default=True,
        negative=True,
        replaced=Replaced("there is no softmax kernel of its own", EXACT_ATTENTION, False),
    )
    bias_gelu_fusion: bool = flag(
        "Do not fuse bias and GeLU.",
        "--no-bias-gelu-fusion",
        default=True,
        negative=True,
        replaced=Replaced("the fused kernel needs CUDA", "bias, then GeLU", False),
    )
    bias_swiglu_fusion: bool = flag(
        "Do not fuse bias and SwiGLU.",
        "--no-bias-swiglu-fusion",
        default=True,
        negative=True,
    )
    bias_dropout_fusion: bool = flag(
        "Do not fuse bias, dropout and residual.",
        "--no-bias-dropout-fusion",
        default=True,
        negative=True,
        replaced=Replaced("the fused kernel needs CUDA", "bias, dropout, addition", False),
    )
    apply_rope_fusion: bool = flag(
        "Do not use the fused rotary kernel.",
        "--no-rope-fusion",
        default=True,
        negative=True,
        replaced=Replaced("the fused kernel needs CUDA", "rotation by position index", False),
    )
    persist_layer_norm: bool = flag(
        "Do not use the persistent layer-norm kernel.",
        "--no-persist-layer-norm",
        default=True,
        negative=True,
        replaced=Replaced("the persistent kernel needs CUDA", "PyTorch's layer norm", False),
    )
    cross_entropy_loss_fusion: bool = flag(
        "Fuse the cross entropy of the vocabulary shards.",
        default=False,
        replaced=Replaced("the fused kernel needs CUDA", "megatron-core's plain one", False),
    )
    use_flash_attn: bool = flag(
        "Older spelling of --attention-backend flash.",
        default=False,
    )
    use_mcore_models: bool = flag(
        "Use megatron-core's models; they are the only ones here.", default=False
    )
    create_attention_mask_in_dataloader: bool = flag(
        "Do not build attention masks in the data loader; none is ever built.",
        "--no-create-attention-mask-in-dataloader",
        default=True,
        negative=True,
    )
