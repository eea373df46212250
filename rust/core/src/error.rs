//! The one error type of the crate; each variant becomes one class of `sao.errors` in Python.

/// An error of the core; the text names the field, the value and what was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A trajectory, segment or array breaks its contract.
    #[error("{0}")]
    Validation(String),
    /// Bytes from outside are corrupt, truncated, oversized, of another version or not ours.
    #[error("{0}")]
    Wire(String),
    /// The object was closed, also while the caller was waiting on it.
    #[error("{0}")]
    Closed(String),
    /// A wait reached its deadline.
    #[error("{0}")]
    Deadline(String),
    /// A wait was interrupted by a signal.
    #[error("{0}")]
    Interrupted(String),
    /// A bounded buffer has no room and its policy is to refuse.
    #[error("{0}")]
    Full(String),
    /// A task would take an impossible step, or the token ledger does not close.
    #[error("{0}")]
    Ledger(String),
    /// A peer breaks the protocol.
    #[error("{0}")]
    Transport(String),
}

/// Result of every fallible function of the crate.
pub type Result<T> = std::result::Result<T, Error>;
