//! staleness (to be written)
