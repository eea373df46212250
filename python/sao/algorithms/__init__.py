"""The formulas, as pure functions on arrays: no I/O, no configuration, sums and counts instead of means."""
