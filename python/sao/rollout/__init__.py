"""Rollouts: the episode loop, its window and compaction, chat rendering."""
