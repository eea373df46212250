//! trajectory (to be written)
