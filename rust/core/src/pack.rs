//! pack (to be written)
