//! The experience core of `sao`: no Python, no sockets, no clock of its own.
#![deny(unsafe_code)] // allowed in `cpu`, item by item

pub mod advantage;
mod binpack;
pub mod buffer;
mod checksum;
mod cpu;
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
