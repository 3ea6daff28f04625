"""A layer of experts against a brute-force one: token by token, expert by expert, in fp64."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.pool import WorkerPools

LENGTH, ROWS, HIDDEN = 9, 2, 16
BASE = (
    "--num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 9 "
    "--micro-batch-size 2 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 16 "
    "--tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0 --threads 1 "
    "--num-experts 8 --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall "
    "--init-method-std 0.3 "
)
PLAIN = "--disable-bias-linear --swiglu "
LOSSES = "--moe-aux-loss-coeff 0.3 --moe-z-loss-coeff 0.1 "
GROUPS = "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4 "
SIGMOID = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
SHARED = "--moe-shared-expert-intermediate-size 20 "
CASES = {
    "softmax": PLAIN + LOSSES,
    "pre-softmax": PLAIN + LOSSES + "--moe-router-pre-softmax --moe-router-topk 3",
    "one": PLAIN + "--moe-router-pre-softmax --moe-router-topk 1 --moe-apply-probs-on-input",
    "sigmoid": PLAIN + SIGMOID + GROUPS + LOSSES + "--moe-router-topk-scaling-factor 2.5",
    "groups": PLAIN + GROUPS + "--moe-router-dtype fp64",
    "sequences": PLAIN + LOSSES + "--moe-router-load-balancing-type seq_aux_loss",
    "biases": "--squared-relu " + LOSSES,
    "shared": PLAIN + SHARED + "--moe-shared-expert-gate --moe-router-dtype fp32",
    "capacity": PLAIN + LOSSES + "--moe-expert-capacity-factor 0.6",
    "position": PLAIN + "--moe-expert-capacity-factor 0.6 --moe-token-drop-policy position",
    "recompute": PLAIN + LOSSES + "--moe-layer-recompute --recompute-granularity selective",
    "allgather": PLAIN + "--moe-token-dispatcher-type allgather",
}


@dataclass
class Seen:
    """What a rank's layer did with its tokens; gradients by parameter name."""

    output: Tensor
    input_gradient: Tensor
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    counts: Tensor | None
    losses: dict[str, float]


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, what the outputs' gradient is, and which slots hold tokens."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(LENGTH, ROWS, HIDDEN, generator=generator)
    gradient = torch.randn(LENGTH, ROWS, HIDDEN, generator=generator)
    valid = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    valid[0, 6:] = valid[1, 8:] = False
    return hidden, gradient, valid


def run_layer(flags: str, world_size: int = 1) -> Seen:
    """On a rank: build one layer, and pass this rank's row (or both rows) through it."""
    from megatron.packed.arguments import config_from_flags
    from megatron.packed.model import patches
    from megatron.packed.model.builder import first_expert
    from megatron.packed.model.initialization import InitializationConfig, initialize_weights
    from megatron.packed.model.layer_specs import build_layer_spec
    from megatron.packed.model.token_slots import row_slots
    from megatron.packed.model.transformer_config import build_transformer_config
    from megatron.packed.training import environment

    config = config_from_flags(BASE + flags, os.environ)
    this_process = environment.start(config)
    patches.install()
    core = build_transformer_config(config)
    spec = build_layer_spec(config, core, this_process.accelerator)
    layer = spec.layer_specs[0].submodules.mlp(config=core)
    layer.set_layer_number(1)
    holder = torch.nn.ModuleDict({"mlp": layer})
    initialization = InitializationConfig(
        seed=1,
        std=0.3,
        num_layers=1,
        gated_linear_unit=core.gated_linear_unit,
        tp_rank=0,
        tp_size=1,
        vocab_size=16,
        first_expert=first_expert(core),
    )
    initialize_weights(holder, initialization)
    for name, parameter in holder.named_parameters():
        if parameter.dim() == 1 and "router" not in name:  # biases start at zero: give them a say
            number = int(name.split(".")[3]) + initialization.first_expert
            parameter.data.copy_(torch.linspace(-0.1, 0.2, parameter.numel()) * (1 + number))
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.linspace(-0.2, 0.2, 8).flip(0))
    hidden, gradient, valid = _inputs()
    if world_size > 1:
        rank = torch.distributed.get_rank()
        hidden, gradient = (x[:, rank : rank + 1].contiguous() for x in (hidden, gradient))
        valid = valid[rank : rank + 1]
    hidden.requires_grad_()
    output, bias = layer(hidden, padding_mask=row_slots(valid))
    assert bias is None
    output.backward(gradient)
    return Seen(
        output=output.detach(),
        input_gradient=hidden.grad,
        weights={name: x.detach() for name, x in holder.named_parameters()},
        gradients={name: x.grad for name, x in holder.named_parameters() if x.grad is not None},
        counts=layer.router.local_tokens_per_expert,
        losses={name: float(x) for name, x in layer.router.losses.items()},
    )


class Oracle:
    """The layer as its papers write it; parameters in fp64, by the names of the real one."""

    def __init__(self, flags: str, weights: dict[str, Tensor]) -> None:
        from megatron.packed.arguments import config_from_flags

        self.config = config_from_flags(BASE + flags)
        self.moe = self.config.moe
        self.weights = {name: x.double().requires_grad_() for name, x in weights.items()}
        self.counts = torch.zeros(8)
        self.losses: dict[str, float] = {}

    def parameter(self, name: str) -> Tensor | None:
        return self.weights.get("mlp." + name)

    def expert(self, number: int, x: Tensor) -> Tensor:
        return self.feed_forward(f"experts.local_experts.{number}.", x)

    def feed_forward(self, prefix: str, x: Tensor) -> Tensor:
        inner = F.linear(x, *self._linear(prefix + "linear_fc1"))
        if self.config.model.swiglu:
            gate, up = inner.chunk(2)
            inner = F.silu(gate) * up
        else:
            inner = F.relu(inner).square()
        return F.linear(inner, *self._linear(prefix + "linear_fc2"))

    def _linear(self, name: str) -> tuple[Tensor, Tensor | None]:
        weight = self.parameter(name + ".weight")
        assert weight is not None
        return weight, self.parameter(name + ".bias")

    def choose(self, logits: Tensor) -> dict[int, Tensor]:
        """Weights of one token's experts."""
        moe, topk = self.moe, self.moe.moe_router_topk
        sigmoid = moe.moe_router_score_function == "sigmoid"
        scores = logits.sigmoid() if sigmoid else logits.softmax(0)
        wanted = scores if sigmoid or moe.moe_router_pre_softmax else logits
        if moe.moe_router_enable_expert_bias:
            wanted = wanted + torch.linspace(-0.2, 0.2, 8).flip(0).double()
        wanted, allowed = wanted.detach(), list(range(8))
        if moe.moe_router_num_groups:
            groups = [range(i, i + 2) for i in range(0, 8, 2)]
            best = topk // moe.moe_router_group_topk
            groups.sort(key=lambda g: -sum(sorted(float(wanted[i]) for i in g)[-best:]))
            allowed = [i for g in groups[: moe.moe_router_group_topk] for i in g]
        chosen = sorted(allowed, key=lambda i: -float(wanted[i]))[:topk]
        if sigmoid:
            weights = scores[chosen] / (scores[chosen].sum() if topk > 1 else 1.0)
        elif moe.moe_router_pre_softmax:
            weights = scores[chosen]
        else:
            weights = logits[chosen].softmax(0)
        weights = weights * (moe.moe_router_topk_scaling_factor or 1.0)
        return dict(zip(chosen, weights, strict=True))

    def loss(self, logits: list[Tensor], rows: list[int]) -> Tensor:
        """The losses of a micro-batch, from the logits of its tokens."""
        moe, total = self.moe, torch.zeros((), dtype=torch.double)
        if moe.moe_z_loss_coeff:
            z = torch.stack([x.logsumexp(0) ** 2 for x in logits]).mean()
            self.losses["z_loss"] = float(z.detach())
            total = total + moe.moe_z_loss_coeff * z
        (coefficient,), (kind,) = moe.moe_aux_loss_coeff, moe.moe_router_load_balancing_type
        if not coefficient:
            return total
        keys = rows if kind == "seq_aux_loss" else [0] * len(rows)
        value = torch.zeros((), dtype=torch.double)
        for key in set(keys):
            mine = [x for x, k in zip(logits, keys, strict=True) if k == key]
            counts, sums = torch.zeros(8), torch.zeros(8, dtype=torch.double)
            for x in mine:
                scores = x.softmax(0) if moe.moe_router_score_function == "softmax" else x.sigmoid()
                scores = scores / scores.sum()
                counts[scores.topk(moe.moe_router_topk).indices] += 1
                sums = sums + scores
            one = 8 * (counts * sums).sum() / (moe.moe_router_topk * len(mine) ** 2)
            value = value + one * len(mine) / len(logits)
        name = "seq_load_balancing_loss" if kind == "seq_aux_loss" else "load_balancing_loss"
        self.losses[name] = float(value.detach())
        return total + coefficient * value

    def keep(self, choices: list[dict[int, Tensor]]) -> list[dict[int, Tensor]]:
        """Drop what is over an expert's capacity; tokens come in order."""
        factor = self.moe.capacity_factor
        if factor is None:
            return choices
        capacity = math.ceil(len(choices) * self.moe.moe_router_topk / 8 * factor)
        kept: list[dict[int, Tensor]] = [{} for _ in choices]
        for expert in range(8):
            wanting = [t for t, each in enumerate(choices) if expert in each]
            if self.moe.moe_token_drop_policy == "probs":
                wanting.sort(key=lambda t: -float(choices[t][expert].detach()))
            for token in wanting[:capacity]:
                kept[token][expert] = choices[token][expert]
        return kept

    def run(self, hidden: Tensor, gradient: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and the gradient of the inputs; slots without a token get the shared expert."""
        hidden = hidden.double().requires_grad_()
        slots = [(s, b) for s in range(hidden.shape[0]) for b in range(hidden.shape[1])]
        tokens = [(s, b) for s, b in slots if valid[b, s]]
        router, bias = self.parameter("router.weight"), self.parameter("router.bias")
        logits = [F.linear(hidden[at], router, bias) for at in tokens]
        choices = self.keep([self.choose(x) for x in logits])
        outputs = {at: torch.zeros(HIDDEN, dtype=torch.double) for at in slots}
        for at, chosen in zip(tokens, choices, strict=True):
            for number, weight in chosen.items():
                self.counts[number] += 1
                if self.moe.moe_apply_probs_on_input:
                    outputs[at] = outputs[at] + self.expert(number, weight * hidden[at])
                else:
                    outputs[at] = outputs[at] + weight * self.expert(number, hidden[at])
        if self.moe.moe_shared_expert_intermediate_size:
            gate = self.parameter("shared_experts.gate_weight")
            for at in slots:
                shared = self.feed_forward("shared_experts.", hidden[at])
                outputs[at] = outputs[at] + shared * F.linear(hidden[at], gate).sigmoid()
        output = torch.stack([outputs[at] for at in slots]).view(hidden.shape)
        loss = (output * gradient).sum() + self.loss(logits, [b for _, b in tokens])
        loss.backward()
        assert hidden.grad is not None
        return output.detach(), hidden.grad


def close(one: Any, other: Any) -> None:
    difference = float((one.double() - other.double()).norm())
    assert difference <= 2e-6 * float(other.double().norm()), difference


@pytest.mark.parametrize("case", CASES)
def test_layer_equals_brute_force(case: str, worker_pool: WorkerPools) -> None:
    (seen,) = worker_pool(1).run(run_layer, CASES[case])
    oracle = Oracle(CASES[case], seen.weights)
    output, input_gradient = oracle.run(*_inputs())
    close(seen.output, output)
    close(seen.input_gradient, input_gradient)
    assert seen.losses == pytest.approx(oracle.losses, rel=2e-6)
    for name, weight in oracle.weights.items():
        if weight.grad is None:
            assert not seen.gradients[name].any()
        else:
            close(seen.gradients[name], weight.grad)
    if seen.counts is not None:
        assert torch.equal(seen.counts, oracle.counts)


@pytest.mark.parametrize("case", ["softmax", "sigmoid", "shared", "biases", "allgather"])
def test_experts_on_two_processes(case: str, worker_pool: WorkerPools) -> None:
    """Each rank has a row and half of the experts."""
    flags = CASES[case].replace(LOSSES, "")
    ranks = worker_pool(2).run(run_layer, flags + " --expert-model-parallel-size 2", 2)
    (one,) = worker_pool(1).run(run_layer, flags)
    close(torch.cat([seen.output for seen in ranks], dim=1), one.output)
    close(torch.cat([seen.input_gradient for seen in ranks], dim=1), one.input_gradient)
    for expert in range(8):
        rank, local = divmod(expert, 4)
        for name, whole in one.gradients.items():
            if f"local_experts.{expert}." in name:
                mine = name.replace(f"local_experts.{expert}.", f"local_experts.{local}.")
                close(ranks[rank].gradients[mine], whole)
                assert torch.equal(ranks[rank].weights[mine], one.weights[name])


def test_a_slot_without_a_token_gets_nothing(worker_pool: WorkerPools) -> None:
    """Neither output nor gradient, and what stands there changes no bit elsewhere."""
    (seen,) = worker_pool(1).run(run_layer, CASES["capacity"])
    _, _, valid = _inputs()
    padding = ~valid.transpose(0, 1)
    assert not seen.output[padding].any()
    assert not seen.input_gradient[padding].any()
