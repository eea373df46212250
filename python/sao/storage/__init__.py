"""Things of the machine that all layers use: checkpoints, owners of folders, parent death, and failpoints."""
