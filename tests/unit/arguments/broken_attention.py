"""Command lines that break one rule on positions or attention each; `test_rules.py` runs them."""

from __future__ import annotations

MLA = "--multi-latent-attention "
ROPE = "--position-embedding-type rope "
YARN = "--position-embedding-type yarn "

# (rule, flags that break it and nothing else, what the message must hold, WORLD_SIZE)
BROKEN_ATTENTION = [
    ("rotary_embedding", "--use-rope-scaling", "not learned_absolute", 1),
    (
        "rotary_embedding",
        f"{ROPE} --rotary-percent 0.2",
        "rotates 3 of 16 channels",
        1,
    ),
    ("rotary_embedding", f"{ROPE} --rope-type yarn", "--position-embedding-type rope does", 1),
    ("position_embedding", "--position-embedding-type mrope", "mrope is refused: .*pictures", 1),
    ("position_embedding", "--position-embedding-type relative", "relative is refused: .*T5", 1),
    ("yarn", f"{YARN} --rotary-percent 0.5", "--rotary-percent 0.5: .*whole heads", 1),
    ("yarn", f"{YARN} --rotary-interleaved", "--rotary-interleaved: .*halves", 1),
    ("yarn", f"{YARN} --rotary-seq-len-interpolation-factor 2", "--rotary-scaling-factor", 1),
    ("yarn", f"{MLA} --rotary-percent 0.5", "--rope-type yarn rotates whole heads", 1),
    ("layers_without_rotary", "--no-rope-freq 3", "divisor of --num-layers 4", 1),
    ("layers_without_rotary", "--no-rope-freq 0", "divisor of --num-layers 4", 1),
    ("layers_without_rotary", "--no-rope-freq [1]*3", "for each of --num-layers 4, not 3", 1),
    ("layers_without_rotary", "--no-rope-freq [2]*4", "not 4 numbers up to 2", 1),
    ("layers_without_rotary", "--no-rope-freq x", "'x': must be a whole number or a list", 1),
    ("layers_without_rotary", f"{MLA} --no-rope-freq 2", "rotates its position channels", 1),
    ("windows", "--window-size 8", "--window-size 8: must be two whole numbers", 1),
    ("windows", "--window-size 8,x", "must be two whole numbers", 1),
    ("windows", "--window-size 8,2", "--window-size 8,2: .*0 to the right", 1),
    ("windows", "--window-size (-2,0)", "-1 for all", 1),
    (
        "windows",
        "--window-size 8,0 --window-attn-skip-freq 0",
        "--window-attn-skip-freq 0: must be at least 1",
        1,
    ),
    (
        "windows",
        "--window-size 8,0 --window-attn-skip-freq [1,0]",
        "for each of --num-layers 4, not 2",
        1,
    ),
    ("windows", "--window-size 8,0 --window-attn-skip-freq x", "'x': must be a whole number", 1),
    ("windows", "--window-attn-skip-freq 2", "needs --window-size", 1),
    ("latent_attention", f"{MLA} --group-query-attention", "gives every head its own keys", 1),
    ("latent_attention", f"{MLA} --rotary-interleaved", "--rotary-interleaved: ", 1),
    ("latent_attention", f"{MLA} --use-rope-scaling", "scales by --rotary-scaling-factor", 1),
    (
        "latent_attention",
        f"{MLA} --rotary-seq-len-interpolation-factor 2",
        "scales by --rotary-scaling-factor",
        1,
    ),
    ("latent_attention", f"{MLA} --attention-output-gate", "has no gate", 1),
    ("latent_attention", f"{MLA} --qk-l2-norm", "normalises its latents", 1),
    ("latent_attention", f"{MLA} --qk-pos-emb-head-dim 7", "use an even number", 1),
    (
        "latents_over_tensor_parallel",
        f"{MLA} --q-lora-rank 7 --tensor-model-parallel-size 2",
        "--q-lora-rank 7",
        2,
    ),
    (
        "latents_over_tensor_parallel",
        f"{MLA} --kv-lora-rank 7 --tensor-model-parallel-size 2",
        "makes 71 columns",
        2,
    ),
    (
        "softmax",
        "--softmax-type learnable --attention-dropout 0.1",
        "--softmax-type learnable: .*set --attention-dropout 0.0, not 0.1",
        1,
    ),
    ("head_norms", "--qk-l2-norm --qk-layernorm", "choose one norm", 1),
]
