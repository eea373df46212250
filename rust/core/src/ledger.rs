//! ledger (to be written)
