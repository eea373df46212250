"""What is on disk: checkpoints, owners of folders, and the points at which tests break it."""
