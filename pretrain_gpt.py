"""Pre-train a GPT: `torchrun --nproc-per-node N pretrain_gpt.py --use-packed-sequence ...`."""

from __future__ import annotations

import os
import sys

from megatron.packed.arguments import (
    config_report,
    parse_arguments,
    validate,
    with_checkpoint_arguments,
)
from megatron.packed.cli import user_errors


def main() -> None:
    """Read the command line, build the run, train, evaluate."""
    config = validate(with_checkpoint_arguments(parse_arguments(sys.argv[1:], os.environ)))
    if config.runtime.print_config:
        if config.parallel.rank == 0:
            print(config_report(config, everything=True))
        return

    # torch loads once the command line is known to be right, megatron-core once the environment
    # has prepared this process for it.
    from megatron.packed.training import environment

    with environment.running(config) as this_process:
        from megatron.packed.training import setup
        from megatron.packed.training.signals import watch_of

        setup.print_banner(config, this_process)
        with watch_of(config) as signals:
            trainer = setup.build_trainer(config, this_process, signals)
            trainer.train()
            trainer.evaluate_final()


if __name__ == "__main__":
    with user_errors():
        main()
