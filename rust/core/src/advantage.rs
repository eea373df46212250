//! advantage (to be written)
