//! buffer (to be written)
