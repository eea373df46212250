"""The learner: from batches of trajectories to new policy versions. `Learner.step` is all of training."""
