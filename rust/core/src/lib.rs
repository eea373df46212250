//! The experience core of `sao`: no Python, no sockets, no clock of its own.
#![forbid(unsafe_code)]
#![cfg_attr(loom, allow(dead_code))] // `tests/models.rs` builds this without the models in it

pub mod advantage;
mod books;
pub mod buffer;
mod checksum;
pub mod error;
mod event;
mod history;
mod journal;
pub mod layout;
pub mod ledger;
mod msgpack;
pub mod pack;
pub mod plan;
mod record;
mod rules;
mod runs;
pub mod sidecar;
pub mod staleness;
mod sync;
pub mod trajectory;
pub mod wait;
pub mod wire;

pub use error::{Error, Result};
