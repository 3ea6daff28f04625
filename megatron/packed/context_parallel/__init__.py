"""Who holds which token of a pack, and how it is exchanged."""
