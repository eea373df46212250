//! The experience core of `sao`: no Python, no sockets, no clock of its own.
#![forbid(unsafe_code)]

pub mod advantage;
pub mod buffer;
pub mod error;
mod event;
pub mod history;
pub mod journal;
pub mod ledger;
pub mod pack;
pub mod staleness;
pub mod trajectory;
pub mod wait;
pub mod wire;

pub use error::{Error, Result};
