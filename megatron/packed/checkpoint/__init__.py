"""Checkpoints on disk: folders that appear whole or not at all, and what is known about them.

Nothing here knows of models or optimizers: `folder` names and finds checkpoints, `manifest` says
whether one is intact, `storage` writes and reads the sharded part through megatron-core, `trust`
keeps foreign pickles from being run.
"""
