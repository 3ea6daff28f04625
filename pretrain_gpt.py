"""Pre-train a GPT: `torchrun --nproc-per-node N pretrain_gpt.py --use-packed-sequence ...`."""

from __future__ import annotations

import os
import sys

from megatron.packed.arguments import parse_arguments, validate
from megatron.packed.cli import user_errors


def main() -> None:
    """Read the command line, build the run, train, evaluate."""
    config = validate(parse_arguments(sys.argv[1:], os.environ))

    # torch and megatron-core load once the command line is known to be right.
    from megatron.packed.training import environment, setup

    with environment.running(config) as this_process:
        setup.print_banner(config, this_process)
        trainer = setup.build_trainer(config, this_process)
        trainer.train()
        trainer.evaluate_final()


if __name__ == "__main__":
    with user_errors():
        main()
