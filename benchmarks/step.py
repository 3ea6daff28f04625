"""Training steps side by side: packed, padded, Hugging Face, bare megatron-core.

    make bench-step

Two tables: the documents of the corpus as they are (files of the standard library, longer than a
pack more often than not), and the same tokens cut at log-normal lengths like those of web text
(mu 5.95, sigma 1.26: median 384 tokens, mean 850). All contenders run in one process, on the same
documents, with the same model shape (10.2 M parameters: hidden 256, 8 layers, 4 heads, SwiGLU,
RMSNorm, RoPE, vocabulary 8,192), fp32, AdamW, one step a pack of 4,096 tokens or a batch of padded
documents. The unit is real tokens trained per second. Contenders take turns; medians over the
turns are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.packed.arguments import Config, config_from_flags
from megatron.packed.cli import user_errors

SEQUENCE = 4096
ROWS_PER_PADDED_BATCH = 4
CONSECUTIVE_STEPS = 8

FLAGS = f"""
    --num-layers 8 --hidden-size 256 --num-attention-heads 4 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0.0
    --hidden-dropout 0.0 --untie-embeddings-and-output-weights --seq-length {SEQUENCE}
    --micro-batch-size 1 --lr 1e-4 --train-iters 1000 --eval-iters 0 --num-workers 1
    --log-interval 1 --tokenizer-type HuggingFaceTokenizer --split 100,0,0
"""


@dataclass
class Contender:
    """Something that trains a step.

    Attributes:
        name: row of the table.
        step: trains once and returns the real tokens trained, and of packs the sum of squared
            lengths.
        rates: tokens per second, one entry a turn.
        seconds: step times.
        counts: what each turn trained.
    """

    name: str
    step: Callable[[], tuple[int, int]]
    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)

    def turn(self) -> None:
        """Time one step."""
        start = time.perf_counter()
        count = self.step()
        elapsed = time.perf_counter() - start
        self.rates.append(count[0] / elapsed)
        self.seconds.append(elapsed)
        self.counts.append(count)

    def forget(self) -> None:
        """Drop the turns so far."""
        for turns in (self.rates, self.seconds, self.counts):
            turns.clear()


@dataclass(frozen=True)
class Corpus:
    """Where the documents are.

    Attributes:
        folder: folder of `make demo`, with its tokenizer.
        prefix: prefix of the .bin and .idx files.
    """

    folder: Path
    prefix: Path

    def config(self, extra: str) -> Config:
        """The benchmark's configuration with some flags added."""
        return config_from_flags(
            f"{FLAGS} --data-path {self.prefix} --data-cache-path {self.folder / 'cache'} "
            f"--tokenizer-model {self.folder / 'tokenizer'} {extra}"
        )


def recut_corpus(folder: Path) -> Corpus:
    """The corpus's tokens cut at log-normal lengths, each document closed by an EOD."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from megatron.packed.data.files import publish
    from megatron.packed.data.index_files import CorpusWriter
    from megatron.packed.data.tokenizers import build_tokenizer

    corpus = Corpus(folder, folder / "lognormal_text_document")
    if corpus.prefix.with_suffix(".idx").exists():
        return corpus
    source = IndexedDataset(str(folder / "corpus_text_document"))
    tokens = np.concatenate([source[i] for i in range(len(source))]).astype(np.uint16)
    eod = build_tokenizer(corpus.config("").data).eod
    tokens = tokens[tokens != eod]
    drawn = np.random.default_rng(0).lognormal(5.95, 1.26, len(tokens) // 400)
    ends = np.cumsum(np.maximum(drawn.astype(np.int64), 1))
    ends = ends[ends < len(tokens)]
    closed = np.insert(tokens, ends, eod)[: ends[-1] + len(ends)]
    lengths = np.diff(ends, prepend=0) + 1
    writer = CorpusWriter(str(corpus.prefix), np.uint16)
    writer.add(closed, lengths, np.ones(len(lengths), dtype=np.int64))
    publish(writer.finalize())
    return corpus


class CountingSource:
    """A batch source that remembers what its last batch held."""

    def __init__(self, source: Any) -> None:
        self.source, self.environment = source, source.environment
        self.block_diagonal, self.loader = source.block_diagonal, source.loader
        self.count, self.waited = (0, 0), 0.0

    def read(self) -> Any:
        """Read on."""
        start = time.perf_counter()
        batch = self.source.read()
        self.waited += time.perf_counter() - start
        counts = getattr(batch, "statistics", batch)
        self.count = counts.real_tokens, getattr(counts, "sum_squared_lengths", 0)
        return batch


def packed_loop(corpus: Corpus, environment: Any) -> tuple[Contender, CountingSource]:
    """Our training loop (loader, packing, step, report lines), and where its data comes from."""
    from megatron.packed.training import setup

    trainer = setup.build_trainer(corpus.config("--use-packed-sequence"), environment)
    source = CountingSource(trainer.splits.train.source)
    trainer.splits.train.source = source

    def step() -> tuple[int, int]:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer._train_one()
        return source.count

    return Contender("ours, packed, training loop", step), source


def print_data_time(loop: Contender, source: CountingSource) -> None:
    """Print what steps wait for data when they follow each other, with nothing between them."""
    source.waited, start = 0.0, time.perf_counter()
    for _ in range(CONSECUTIVE_STEPS):
        loop.step()
    share = source.waited / (time.perf_counter() - start)
    print(f"data time over {CONSECUTIVE_STEPS} consecutive packed steps: {100 * share:.2f} %")


def _build_step(config: Config, environment: Any) -> tuple[Any, Any]:
    from megatron.packed.data.tokenizers import build_tokenizer
    from megatron.packed.training import setup

    tokenizer = build_tokenizer(config.data)
    return setup.build_step(config, environment, tokenizer), tokenizer


def bare_core(corpus: Corpus, environment: Any) -> Callable[[], tuple[int, int]]:
    """megatron-core's forward-backward and optimizer on packs made beforehand; no loop of ours."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron.packed.loss.token import token_loss
    from megatron.packed.training.data import build_splits
    from megatron.packed.training.progress import Progress

    config = corpus.config("--use-packed-sequence")
    train_step, tokenizer = _build_step(config, environment)
    batches = build_splits(config, environment, tokenizer, Progress()).train
    ready = [next(batches) for _ in range(24)]
    turn = iter(range(len(ready)))

    def forward_step(batch: Any, model: torch.nn.Module) -> Any:
        losses = model(
            batch.tokens,
            batch.position_ids,
            None,
            labels=batch.labels,
            packed_seq_params=batch.packed_seq_params,
        )

        def loss(output: torch.Tensor) -> Any:
            result = token_loss(output, batch.loss_mask)
            return result.total, result.count, {"lm loss": result.report}

        return losses, loss

    def step() -> tuple[int, int]:
        batch = ready[next(turn)]
        train_step.model[0].zero_grad_buffer()
        train_step.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batch,
            model=train_step.model,
            num_microbatches=1,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        train_step.optimizer.step()
        return batch.statistics.real_tokens, batch.statistics.sum_squared_lengths

    return step


def padded_documents(corpus: Corpus, tokenizer: Any) -> Iterator[list[dict[str, Any]]]:
    """Endless batches of documents, one a row, padded to the sequence length."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    indexed = IndexedDataset(str(corpus.prefix))
    order = np.random.default_rng(0).permutation(len(indexed))
    rows: list[dict[str, Any]] = []
    while True:
        for document in order:
            ids = np.asarray(indexed[int(document)][: SEQUENCE + 1], dtype=np.int64)
            text = np.full(SEQUENCE + 1, tokenizer.eod, dtype=np.int64)
            text[: len(ids)] = ids
            rows.append({"text": text, "length": len(ids)})
            if len(rows) == ROWS_PER_PADDED_BATCH:
                yield rows
                rows = []


def padded_rows(corpus: Corpus, environment: Any) -> Callable[[], tuple[int, int]]:
    """Our BSHD path: one document a row, padded to the sequence length."""
    from megatron.packed.training.batches import BatchSource, MicroBatchIterator
    from megatron.packed.training.collation import build_collator

    config = corpus.config(f"--micro-batch-size {ROWS_PER_PADDED_BATCH}")
    train_step, tokenizer = _build_step(config, environment)
    collate = build_collator(config, tokenizer.eod)
    loader = (collate(rows) for rows in padded_documents(corpus, tokenizer))
    source = CountingSource(BatchSource(loader, environment, block_diagonal=False))
    batches = MicroBatchIterator(source)  # type: ignore[arg-type]

    def step() -> tuple[int, int]:
        train_step(batches, num_microbatches=1, global_batch_size=ROWS_PER_PADDED_BATCH)
        return source.count

    return step


def _llama(vocabulary: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    return model, optimizer


def _llama_update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **batch: Any) -> None:
    optimizer.zero_grad()
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def llama_padded(corpus: Corpus, tokenizer: Any) -> Callable[[], tuple[int, int]]:
    """Hugging Face Llama on padded batches, each padded to its longest document only.

    Padding is on the right, so causal attention needs no mask: the fastest path that library has.
    """
    model, optimizer = _llama(tokenizer.vocab_size)
    documents = padded_documents(corpus, tokenizer)

    def step() -> tuple[int, int]:
        rows = next(documents)
        lengths = torch.tensor([min(row["length"], SEQUENCE) for row in rows])
        longest = int(lengths.max())
        ids = torch.from_numpy(np.stack([row["text"][:longest] for row in rows]))
        mask = torch.arange(longest)[None, :] < lengths[:, None]
        labels = torch.where(mask, ids, -100)
        _llama_update(model, optimizer, input_ids=ids, labels=labels)
        return int(lengths.sum()), 0

    return step


def llama_packed(corpus: Corpus, environment: Any, tokenizer: Any) -> Callable[[], tuple[int, int]]:
    """Hugging Face Llama on our packs, with the block-diagonal mask that its SDPA path takes."""
    from megatron.packed.training.data import build_splits
    from megatron.packed.training.progress import Progress

    model, optimizer = _llama(tokenizer.vocab_size)
    config = corpus.config("--use-packed-sequence")
    batches = build_splits(config, environment, tokenizer, Progress()).train

    def step() -> tuple[int, int]:
        batch = next(batches)
        boundaries = batch.packed_seq_params.cu_seqlens_q.long()
        document = torch.bucketize(torch.arange(SEQUENCE), boundaries[1:], right=True)
        causal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
        mask = (document[:, None] == document[None, :]) & causal
        labels = torch.where(batch.loss_mask.bool(), batch.labels, -100)
        _llama_update(
            model,
            optimizer,
            input_ids=batch.tokens,
            position_ids=batch.position_ids,
            attention_mask=mask[None, None],
            labels=labels,
            shift_labels=labels,
        )
        return batch.statistics.real_tokens, batch.statistics.sum_squared_lengths

    return step


def build_contenders(corpus: Corpus, environment: Any) -> tuple[list[Contender], CountingSource]:
    """Every contender whose packages are installed, and the data source of the first."""
    from megatron.packed.data.tokenizers import build_tokenizer

    tokenizer = build_tokenizer(corpus.config("").data)
    with contextlib.redirect_stdout(io.StringIO()):
        loop, source = packed_loop(corpus, environment)
        contenders = [loop]
        contenders.append(
            Contender("bare megatron-core step, same packs", bare_core(corpus, environment))
        )
        contenders.append(
            Contender("ours, one document a row, padded", padded_rows(corpus, environment))
        )
    try:
        import transformers
    except ImportError:
        print("transformers isn't installed: install .[bench] for the Hugging Face rows")
    else:
        transformers.logging.set_verbosity_error()
        packed = llama_packed(corpus, environment, tokenizer)
        contenders.append(Contender("Hugging Face Llama, packed, block mask", packed))
        padded = llama_padded(corpus, tokenizer)
        contenders.append(Contender("Hugging Face Llama, padded batches of 4", padded))
    return contenders, source


def print_table(contenders: list[Contender], peak: float, flops: Any) -> None:
    """Print medians and ratios to the first contender."""
    first = contenders[0]
    print(f"\n{'contender':42} {'tokens/s':>9} {'min':>7} {'max':>7} {'s/step':>7} {'ours is':>8}")
    for each in contenders:
        rate = statistics.median(each.rates)
        pairs = [a / b for a, b in zip(first.rates, each.rates, strict=True)]
        print(
            f"{each.name:42} {rate:9.0f} {min(each.rates):7.0f} {max(each.rates):7.0f} "
            f"{statistics.median(each.seconds):7.2f} {statistics.median(pairs):7.2f}x"
        )
    reached = statistics.median(
        flops.count(*count) / seconds
        for count, seconds in zip(first.counts, first.seconds, strict=True)
    )
    print(
        f"\nGEMM peak {peak / 1e9:.0f} GFLOP/s (fp32, {torch.get_num_threads()} threads, median "
        f"of 2048^3 products between turns); packed step {reached / 1e9:.0f} GFLOP/s: "
        f"{100 * reached / peak:.0f} % of it"
    )


def run(corpus: Corpus, environment: Any, turns: int) -> None:
    """Let the contenders take turns on one corpus and print its table."""
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

    from megatron.packed.training.flops import FlopsCounter, measure_gemm_peak

    contenders, source = build_contenders(corpus, environment)
    peaks = []
    for turn in range(turns + 1):
        if turn == 1:  # The first turn warmed up.
            for each in contenders:
                each.forget()
            peaks.clear()
        for each in contenders:
            each.turn()
        peaks.append(measure_gemm_peak(torch.device("cpu"), torch.float32, size=2048, repeats=3))
    flops = FlopsCounter.from_config(corpus.config(""), 8192)
    print(f"\n{corpus.prefix.name}, {turns} turns")
    print_table(contenders, statistics.median(peaks), flops)
    print_data_time(contenders[0], source)
    destroy_num_microbatches_calculator()


def main() -> None:
    """Run both corpora."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("demo"), help="Folder of `make demo`.")
    parser.add_argument("--turns", type=int, default=7, help="Timed steps of each contender.")
    arguments = parser.parse_args()

    from megatron.packed.training import environment as environments

    files = Corpus(arguments.data, arguments.data / "corpus_text_document")
    environment = environments.start(files.config("--use-packed-sequence"))
    for corpus in (files, recut_corpus(arguments.data)):
        run(corpus, environment, arguments.turns)


if __name__ == "__main__":
    with user_errors():
        main()
